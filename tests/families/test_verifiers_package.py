"""A family as a verifiers package, used by an interpreter that knows nothing of ours."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nestling.core.errors import ConfigError
from nestling.families.registry import ALL, get
from nestling.families.verifiers_package import verifiers_package, write_verifiers_package

_USE = """
import asyncio, importlib, json, sys
import verifiers.v1 as vf
from verifiers.v1 import graph
from verifiers.v1.state import state_cls

async def main():
    found = []
    for name in sys.argv[1:]:
        config = importlib.import_module(name + ".taskset").TasksetConfig
        for task in vf.load_taskset(config(id=name, num_rows=3, seed=5)).load():
            scores = []
            for text in (f"ANSWER: {task.data.answer}", "ANSWER: nothing", ""):
                trace = vf.Trace(
                    task=vf.TraceTask(type="t", data=task.data, key="k", hash="h"),
                    state=state_cls(type(task))(),
                    agent=vf.AgentInfo(config=vf.AgentConfig()),
                )
                turn = graph.prepare_turn(trace, [vf.UserMessage(content=task.data.prompt)], [])
                reply = vf.AssistantMessage(content=text)
                turn.commit(
                    vf.Response(id="r", created=0, model="m", message=reply, finish_reason="stop")
                )
                await task.score(trace)
                scores.append(trace.reward)
            found.append([name, task.data.prompt, task.data.answer, scores])
    assert not [one for one in sys.modules if one == "nestling" or one.startswith("nestling.")]
    print(json.dumps(found))

asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.parametrize("names", [ALL[-1:], pytest.param(ALL, marks=pytest.mark.slow)])
def test_families_load_and_score_without_us(tmp_path: Path, names: tuple[str, ...]) -> None:
    modules = []
    for name in names:
        write_verifiers_package(name, tmp_path / name)
        modules.append(f"nestling_{name}")
    paths = ":".join(str(tmp_path / name) for name in names)
    done = subprocess.run(
        [sys.executable, "-c", _USE, *modules],
        capture_output=True,
        text=True,
        timeout=100,
        env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 3 * len(names)
    for name in names:
        family, rng = get(name), random.Random(5)
        for _, prompt, answer, scores in (row for row in rows if row[0] == f"nestling_{name}"):
            item = family.sample(rng, *family.eval_range)
            assert (prompt, answer) == (item.prompt, item.answer)
            assert scores == [1.0, 0.0, 0.0]


@pytest.mark.slow
def test_it_builds_as_a_wheel(tmp_path: Path) -> None:
    write_verifiers_package("ledger", tmp_path / "package")
    subprocess.run(
        [
            sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
            "--disable-pip-version-check", "--no-index", "-w", tmp_path / "out",
            tmp_path / "package",
        ],
        check=True,
        timeout=100,
    )  # fmt: skip
    [wheel] = (tmp_path / "out").glob("nestling_ledger-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "nestling_ledger/ledger_tools.py" in names
    metadata = next(name for name in names if name.endswith("METADATA"))
    assert "Requires-Dist: verifiers<0.5,>=0.4.0" in zipfile.ZipFile(wheel).read(metadata).decode()


@pytest.mark.parametrize("name", ALL)
def test_no_hidden_or_private_file_is_in_it(name: str) -> None:
    files = verifiers_package(name)
    text = b"".join(files.values()).decode()
    assert "nestling.families" not in text
    assert "secret" not in text.replace("seeds\nstay secret", "")
    assert f"nestling_{name}/{name}_tools.py" in files


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        write_verifiers_package("ledger", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
