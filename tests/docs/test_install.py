"""The wheel and the image: what is installed runs outside the repository."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_image_copies_what_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    sources = [
        source
        for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert {"constraints.txt", "pyproject.toml", "src", "recipes", "README.md"} <= {*sources}
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not any(fnmatch.fnmatch(source, pattern) for pattern in ignored), source


def test_the_image_installs_as_make_does() -> None:
    version = re.search(r"^TORCH \?= (\S+)$", MAKEFILE, re.MULTILINE)
    assert version
    assert f"ARG TORCH={version[1]}\n" in DOCKERFILE
    for step in ("--no-deps --require-hashes -r constraints.txt", "--no-deps --no-build-isolation"):
        assert step in DOCKERFILE
        assert step in MAKEFILE


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_runs_outside_the_repository(tmp_path: Path) -> None:
    built, venv, work = tmp_path / "built", tmp_path / "venv", tmp_path / "work"
    work.mkdir()
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", built, ROOT],
        check=True,
    )  # fmt: skip
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    site = next((venv / "lib").glob("python*/site-packages"))
    # Everything but Nestling comes from here; the venv's own packages go first.
    ours = sysconfig.get_path("purelib")
    (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=work, capture_output=True, text=True, timeout=900,
            env={"PATH": f"{venv}/bin:/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1",
                 "NESTLING_STATE": str(tmp_path / "state"), "LANG": os.environ.get("LANG", "C.UTF-8")},
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    wheel = next(built.glob("nestling-*.whl"))
    run("pip", "install", "-q", "--no-deps", "--no-index", str(wheel))
    where = run("python", "-c", "import nestling; print(nestling.__file__)")
    assert where.startswith(str(site))
    run("nestling", "init", "mine")
    run("nestling", "families", "new", "coins")
    plan = run("nestling", "run", "mine/recipe.toml", "--dry-run", "--json").splitlines()[-1]
    assert json.loads(plan)
    small = {
        "outer.steps": 1, "outer.group_size": 2, "outer.held_out.every_steps": 0,
        "inner.eval_items": 8, "fleet.workers": 2,
    }  # fmt: skip
    options = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    run("nestling", "run", "mine/recipe.toml", "--out", "runs/one", *options)
    assert (work / "runs/one/report/index.html").is_file()
