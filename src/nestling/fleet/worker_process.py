"""How a worker process is started, wherever it runs: command, clean environment; and how it ended."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from nestling.fleet import process_tree

__all__ = ["OURS", "last_words", "passed_on", "worker_command", "worker_environment"]

OURS: Final = "NESTLING_"
"""What the names of our own variables begin with."""

_PASSED_ON = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
_PASSED_ON_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "XDG_")
_LAST_WORDS_BYTES = 2000


def passed_on(*more_prefixes: str) -> dict[str, str]:
    """The part of this process's environment that a worker gets; keys are only in what is ours."""
    prefixes = (*_PASSED_ON_PREFIXES, *more_prefixes)
    return {
        key: value
        for key, value in os.environ.items()
        if key in _PASSED_ON or key.startswith(prefixes)
    }


def worker_environment(marker: str, *more: Mapping[str, str], ours: bool = True) -> dict[str, str]:
    """What is passed on, `more` over it (a later one wins), and what the process tree is known by.

    Without `ours`, none of our own variables is passed on.
    """
    environment = passed_on(*([OURS] if ours else []))
    for one in more:
        environment |= one
    return environment | {process_tree.MARKER: marker, "PYTHONUNBUFFERED": "1"}


def worker_command(
    handlers: str, settings: Mapping[str, Any], beat_s: float, cores: Sequence[int] = ()
) -> list[str]:
    """Starts `fleet.worker` as a child of this process, which it does not outlive.

    It runs on `cores`; without any on all.
    """
    command = [sys.executable, "-P", "-m", "nestling.fleet.worker"]
    command += ["--handlers", handlers, "--settings", json.dumps(settings)]
    command += ["--beat-s", str(beat_s), "--parent", str(os.getpid())]
    return [*command, "--cores", ",".join(str(core) for core in cores)]


def last_words(log: Path) -> str:
    """The end of a worker's log; empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LAST_WORDS_BYTES))
            return file.read().decode("utf-8", "replace").strip()
    except OSError:
        return ""
