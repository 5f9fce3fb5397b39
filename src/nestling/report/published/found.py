"""What the folder of results holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nestling.report.published.measurements import Step
from nestling.report.published.plan import ResultsPlan
from nestling.report.run_data import RunData

__all__ = ["Found"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Everything of the folder that the page shows; what is missing is said to be so."""

    plan: ResultsPlan
    arcs: Mapping[str, RunData]
    """Runs that have data, by the plan's name, and so on."""
    sweeps: Mapping[str, RunData]
    """Measurements made apart with `nestling eval-agent`."""
    steps: Mapping[str, Sequence[Step]]
    """Pilots and other runs of which only the steps were kept, by folder."""
    calibrated: Mapping[str, tuple[float, str]]
    """Best untrained score by family and where it was measured, from before the arcs."""
    spread: Mapping[str, Any] | None
    best_jobs: Mapping[str, Mapping[str, Any]]
    """Files of `nestling best-job`, by path without suffix; their tables are beside them."""
    benchmarks: Mapping[str, Mapping[str, Any]]
    """Files of `nestling bench`, by name."""
    agents: Mapping[str, Any] | None
    sealed: Mapping[str, Any] | None
    """Figures of hidden set C; None while it is sealed."""
    files: frozenset[str]
    """Of those that the plan expects, the ones that are there."""
