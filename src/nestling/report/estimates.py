"""Means of episodes with intervals that respect who shares a task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from nestling.core.seeds import derive_seed
from nestling.outer import stats
from nestling.outer.stats import Estimate
from nestling.report.run_data import EpisodeRow

__all__ = ["by_group", "estimate"]

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


@lru_cache(maxsize=8192)
def _resampled(values: tuple[tuple[float, ...], ...], seed: int) -> Estimate | None:
    """Remembered, because a page that follows a run asks for the same steps again and again."""
    return stats.cluster_mean(values, seed=seed)
