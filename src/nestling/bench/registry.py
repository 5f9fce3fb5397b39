"""All benchmarks by name. To add one: write `bench/<name>.py` with `measure` and enter it here.

The command `nestling bench <name>` follows from the entry; only one with options of its own needs code there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from nestling.bench.record import Measured

__all__ = ["BENCHMARKS", "Benchmark", "Measure", "measure_of"]

Measure = Callable[..., "Measured"]
"""`measure(...)` of a benchmark module; every argument has a default. Progress: `progress.tell`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """What it measures, and which of the usual arguments its `measure` takes."""

    measures: str
    families: str = ""
    """Those measured by default, as in `--families`; empty: it does not ask for families."""
    has_runs: bool = True
    """`runs`: repetitions of which medians are told."""
    has_room: bool = False
    """`config`: a recipe, for a machine room."""


BENCHMARKS: Final[Mapping[str, Benchmark]] = MappingProxyType(
    {
        "engine": Benchmark(
            measures="decode, rollouts, training and GRPO steps on one CPU thread, beside peers"
        ),
        "gpu": Benchmark(
            measures="decode, GRPO steps, stacked jobs and memory on a GPU, part by part",
            has_runs=False,
            has_room=True,
        ),
        "plumbing": Benchmark(
            measures="what a rollout costs in env worker and pipe, beside verifiers' own lifecycle",
            families="all",
        ),
        "probe": Benchmark(
            measures="how long the probe of a template job takes with a warm worker",
            families="all",
            has_room=True,
        ),
        "job": Benchmark(
            measures="CPU seconds of a template job, part by part",
            families="training",
            has_room=True,
        ),
        "spread": Benchmark(
            measures="how far good and bad jobs lie apart on every family",
            families="training",
            has_runs=False,
            has_room=True,
        ),
    }
)
"""By name of the module and of the command."""


def measure_of(name: str) -> Measure:
    """The benchmark's `measure`, its module imported now; `KeyError` for an unknown name."""
    if name not in BENCHMARKS:
        raise KeyError(name)
    measure: Measure = importlib.import_module(f"nestling.bench.{name}").measure
    return measure
