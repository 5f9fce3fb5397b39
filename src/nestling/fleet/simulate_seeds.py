"""The same simulation over many seeds: one seed says little about 40 jobs on 16 workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, quantiles
from typing import Any

from nestling.fleet.simulate import Simulation, simulate

__all__ = ["SeedsReport", "Spread", "simulate_seeds"]

_WELL = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One figure over seeds."""

    mean: float
    tenth_percentile: float
    worst: float
    share_at_97: float
    """Share of the seeds at 97 % or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedsReport:
    """How busy the pool kept its workers, compared with the best possible schedule.

    That schedule lies between a bound and the best one found, so the true share lies between the
    two spreads.
    """

    seeds: int
    jobs: int
    workers: int
    prediction_sigma: float | None
    of_bound: Spread
    of_best_found: Spread
    lost: int
    duplicated: int

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def simulate_seeds(simulation: Simulation, num_seeds: int) -> SeedsReport:
    """Run seeds `simulation.seed` and the next ones; each in a store of its own."""
    of_bound, of_best_found, lost, duplicated = [], [], 0, 0
    for seed in range(simulation.seed, simulation.seed + num_seeds):
        hazards = replace(simulation.hazards, seed=seed)
        report = simulate(replace(simulation, seed=seed, hazards=hazards))
        of_bound.append(report.lower_bound_s / report.makespan_s)
        best_s = report.best_found_s if report.best_found_s is not None else report.lower_bound_s
        # A schedule that beats the search is itself the best one found.
        of_best_found.append(min(1.0, best_s / report.makespan_s))
        lost += report.lost
        duplicated += report.duplicated
    return SeedsReport(
        seeds=num_seeds,
        jobs=simulation.num_jobs,
        workers=simulation.num_workers,
        prediction_sigma=simulation.prediction_sigma,
        of_bound=_spread(of_bound),
        of_best_found=_spread(of_best_found),
        lost=lost,
        duplicated=duplicated,
    )


def _spread(shares: Sequence[float]) -> Spread:
    tenth = quantiles(shares, n=10, method="inclusive")[0] if len(shares) > 1 else shares[0]
    return Spread(
        mean=round(fmean(shares), 4),
        tenth_percentile=round(tenth, 4),
        worst=round(min(shares), 4),
        share_at_97=round(sum(share >= _WELL for share in shares) / len(shares), 4),
    )
