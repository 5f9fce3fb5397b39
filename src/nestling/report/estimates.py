"""Means of episodes with intervals that respect who shares a task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np

from nestling.core.seeds import derive_seed
from nestling.outer import stats
from nestling.outer.stats import Estimate
from nestling.report.run_data import EpisodeRow

__all__ = ["by_group", "estimate", "stratified"]

_RESAMPLES = 2_000
_ROOT = 0x52455054
"""Root of the resampling streams, so that a report of the same run is the same each time."""


def by_group(episodes: Iterable[EpisodeRow]) -> list[list[EpisodeRow]]:
    """Episodes that share a task together: training groups, and measured episodes one by one."""
    groups: dict[str, list[EpisodeRow]] = {}
    for one in episodes:
        groups.setdefault(one.group_id if one.purpose == "train" else one.id, []).append(one)
    return list(groups.values())


def estimate(
    groups: Sequence[Sequence[EpisodeRow]],
    value: Callable[[EpisodeRow], float | None],
    *names: str | int,
) -> Estimate | None:
    """Mean of `value` where it is not None, with a 95 % interval; None when it never is.

    Whole groups are redrawn. With a single group its episodes are: the interval then covers that
    one task only, as in the run's own step records. `names` pick the random stream.
    """
    values = [[x for one in group if (x := value(one)) is not None] for group in groups]
    filled = [group for group in values if group]
    if len(filled) == 1:
        filled = [[x] for x in filled[0]]
    return _resampled(tuple(tuple(group) for group in filled), derive_seed(_ROOT, *names))


def stratified(
    strata: Sequence[tuple[float, Sequence[float]]], *names: str | int
) -> Estimate | None:
    """Weighted mean over strata, each a weight and its values, with a 95 % interval.

    Values are redrawn within their stratum; no interval when one of them has a single value. None
    when there is no stratum, or one has no value. `names` pick the random stream.
    """
    total = sum(weight for weight, _ in strata)
    if not total or not all(values for _, values in strata):
        return None
    arrays = [(weight / total, np.asarray(values, dtype=np.float64)) for weight, values in strata]
    mean = sum(share * float(values.mean()) for share, values in arrays)
    num = sum(values.size for _, values in arrays)
    if any(values.size < 2 for _, values in arrays):
        return Estimate(mean=mean, lo=None, hi=None, n=num)
    rng = np.random.default_rng(derive_seed(_ROOT, *names))
    means_R = np.zeros(_RESAMPLES)
    for share, values in arrays:
        pick = rng.integers(0, values.size, size=(_RESAMPLES, values.size))
        means_R += share * values[pick].mean(axis=1)
    low, high = np.quantile(means_R, [0.025, 0.975])
    return Estimate(mean=mean, lo=float(low), hi=float(high), n=num)


@lru_cache(maxsize=8192)
def _resampled(values: tuple[tuple[float, ...], ...], seed: int) -> Estimate | None:
    """Remembered, because a page that follows a run asks for the same steps again and again."""
    return stats.cluster_mean(values, seed=seed)
