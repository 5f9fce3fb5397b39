"""What a run left behind, before anything is computed from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nestling.agent.reward import RewardWeights
from nestling.outer.step_report import StepReport
from nestling.outer.sweep_report import Sweep
from nestling.report.run_data import EpisodeRow, JobRow, MachineCost, RunInfo
from nestling.store.money import Spending

__all__ = ["RunRecords"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """Read from a run store or from an export of one; equal records give equal reports."""

    info: RunInfo
    weights: RewardWeights | None
    """None: the run recorded none."""
    training_families: tuple[str, ...]
    """In the order in which they were first trained on."""
    baselines: Mapping[str, Mapping[str, float]]
    """Untrained scores by family and base, as agents were shown them."""
    steps: tuple[StepReport, ...]
    sweeps: Mapping[int, Sweep]
    """By the step they followed."""
    episodes: tuple[EpisodeRow, ...]
    """Finished ones, group by group."""
    jobs: tuple[JobRow, ...]
    running_episodes: int
    failed_episodes: int
    """Broken by the machinery."""
    costs: tuple[MachineCost, ...]
    family_costs: tuple[Spending, ...]
    usd: float | None
    """Settled in all; None when no machine time was accounted."""
    usd_reserved: float
