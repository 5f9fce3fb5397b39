"""All benchmarks by name. To add one: write `bench/<name>.py` with `measure` and enter it here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from nestling.bench.record import Measured

__all__ = ["BENCHMARKS", "Measure", "measure_of"]

Measure = Callable[[], Measured]
"""`measure(...)` of a benchmark module; every argument has a default. Progress: `progress.tell`."""

BENCHMARKS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "engine": "decode, rollouts, training and GRPO steps on one CPU thread, beside peers",
        "gpu": "decode, GRPO steps, stacked jobs and memory on a GPU, part by part",
        "plumbing": "what a rollout costs in env worker and pipe, beside verifiers' own lifecycle",
        "probe": "how long the probe of a template job takes with a warm worker",
        "job": "CPU seconds of a template job, part by part",
        "spread": "how far good and bad jobs lie apart on every family",
    }
)
"""Name of the module and of the command, and what it measures."""


def measure_of(name: str) -> Measure:
    """The benchmark's `measure`, its module imported now; `KeyError` for an unknown name."""
    if name not in BENCHMARKS:
        raise KeyError(name)
    measure: Measure = importlib.import_module(f"nestling.bench.{name}").measure
    return measure
