from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SMALL = (
    "outer.steps=1",
    "outer.group_size=2",
    "outer.max_parallel_episodes=2",
    "outer.held_out.every_steps=0",
    "inner.eval_items=8",
    "inner.leak_items=32",
    "fleet.workers=1",
)
"""Settings that make the nested loop as small as it gets while every part of it is real."""


def without_network() -> list[str]:
    """A command prefix that takes the network away, loopback included; empty where it cannot."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return []
    words = [unshare, "-n"] if os.geteuid() == 0 else [unshare, "-rn"]
    tried = subprocess.run([*words, "true"], capture_output=True, check=False)
    return words if tried.returncode == 0 else []


@pytest.fixture(scope="session")
def state(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture
def nested_run(state: Path) -> Callable[..., subprocess.Popen]:
    """Start `nestling run` in a process group of its own, without network where that is possible."""
    started: list[subprocess.Popen] = []

    def start(
        folder: Path, *settings: str, recipe: str | None = "recipes/quick.toml"
    ) -> subprocess.Popen:
        words = [*without_network(), sys.executable, "-m", "nestling", "run"]
        words += [recipe] if recipe else []
        words += ["--out", str(folder), "--json"]
        words += [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
        process = subprocess.Popen(
            words,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "NESTLING_STATE": str(state), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
