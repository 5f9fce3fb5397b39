"""A benchmark's result with everything needed to judge or repeat it."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import psutil
from pydantic import Field

from nestling import __version__
from nestling.core.clock import Clock
from nestling.core.frozen import Frozen
from nestling.core.machine import commit

__all__ = ["BenchRecord", "Measured", "commit", "machine", "record", "versions"]

_PACKAGES: Final = (
    "torch",
    "numpy",
    "verifiers",
    "tokenizers",
    "safetensors",
    "transformers",
    "trl",
)


class Measured(Frozen):
    """What a benchmark module returns."""

    settings: dict[str, Any] = Field(default_factory=dict)
    """What was asked for, defaults filled in."""
    runs: tuple[dict[str, Any], ...]
    """Single measurements, as raw as is useful."""
    figures: dict[str, Any]
    ratios: dict[str, float] = Field(default_factory=dict)
    """Of ours to another's time: below 1 is faster."""
    columns: tuple[str, ...]
    """Of the table for people."""
    rows: tuple[tuple[str, ...], ...]


class BenchRecord(Frozen):
    """The file below `results/bench/`."""

    name: str
    date: str
    """UTC, to the second."""
    wall_s: float
    command: str
    commit: str | None
    """Of the source folder, with `+changes` when files differ from it; None outside a checkout."""
    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    figures: dict[str, Any]
    ratios: dict[str, float]
    runs: tuple[dict[str, Any], ...]


def record(
    name: str, measured: Measured, *, command: str, wall_s: float, clock: Clock
) -> BenchRecord:
    """Join figures and circumstances."""
    return BenchRecord(
        name=name,
        date=datetime.fromtimestamp(clock.now(), UTC).isoformat(timespec="seconds"),
        wall_s=round(wall_s, 1),
        command=command,
        commit=commit(),
        machine=machine(),
        versions=versions(),
        settings=measured.settings,
        figures=measured.figures,
        ratios=measured.ratios,
        runs=measured.runs,
    )


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, system."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Of Python, of this package and of the libraries that decide speed and results."""
    found = {"python": platform.python_version(), "nestling": __version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
