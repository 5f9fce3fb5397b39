"""The command as a person runs it: in this process where it is quick, as a process where it counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nestling.cli.main import main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
START = [sys.executable, "-c", "from nestling.cli.main import main; main()"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def last(self) -> dict[str, Any]:
        """The JSON object of the last line."""
        return json.loads(self.out.splitlines()[-1])


Run = Callable[..., Done]


@pytest.fixture(scope="session")
def shared_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One state folder for all: baselines and leak indexes are made once."""
    return tmp_path_factory.mktemp("state")


@pytest.fixture(autouse=True)
def _state(shared_state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NESTLING_STATE", str(shared_state))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process."""

    def run(*arguments: str) -> Done:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["nestling", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Done(code=int(ended.value.code or 0), out=out, err=err)

    return run


@pytest.fixture
def process(tmp_path: Path) -> Run:
    """Run the command as a process, perhaps behind another one, in a folder of its own."""

    def run(
        *arguments: str,
        before: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 300,
    ) -> Done:
        done = subprocess.run(
            [*before, *START, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=tmp_path,
            env={**os.environ, **(environment or {})},
        )
        return Done(code=done.returncode, out=done.stdout, err=done.stderr)

    return run


def can_run(*command: str) -> bool:
    """Whether this machine lets us."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
