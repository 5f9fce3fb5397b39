"""How a worker process is started, wherever it runs: command, clean environment, one thread."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["ONE_THREAD", "passed_on", "worker_command"]

_PASSED_ON = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
_PASSED_ON_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "XDG_")

ONE_THREAD = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
        "RAYON_NUM_THREADS",
    ),
    "1",
)
"""Read by numeric libraries when they are imported."""


def passed_on() -> dict[str, str]:
    """The part of this process's environment that a worker gets; no keys among it."""
    return {
        key: value
        for key, value in os.environ.items()
        if key in _PASSED_ON or key.startswith(_PASSED_ON_PREFIXES)
    }


def worker_command(handlers: str, settings: Mapping[str, Any], beat_s: float) -> list[str]:
    """Starts `fleet.worker` as a child of this process, which it does not outlive."""
    command = [sys.executable, "-P", "-m", "nestling.fleet.worker"]
    command += ["--handlers", handlers, "--settings", json.dumps(settings)]
    return [*command, "--beat-s", str(beat_s), "--parent", str(os.getpid())]
