"""Arms compared over the tasks that both played."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from nestling.core.seeds import derive_seed
from nestling.outer import stats
from nestling.outer.stats import Estimate
from nestling.report.run_data import EpisodeRow

__all__ = ["Task", "by_task", "paired_gain"]

Task = tuple[str, int]
"""Family and place in the sweep: what episodes of two arms must share to be compared."""


def by_task(
    episodes: Sequence[EpisodeRow], arm: str, families: Collection[str]
) -> dict[Task, EpisodeRow]:
    """Episodes of one arm on these families."""
    return {
        (one.family, one.member): one
        for one in episodes
        if one.arm == arm and one.family in families
    }


def _reward(episode: EpisodeRow) -> float:
    return episode.reward


def paired_gain(
    after: Mapping[Task, EpisodeRow],
    before: Mapping[Task, EpisodeRow],
    value: Callable[[EpisodeRow], float] = _reward,
) -> Estimate | None:
    """Mean of `after` minus that of `before` over shared tasks; None when they share none."""
    tasks = sorted(after.keys() & before.keys())
    return stats.paired_difference(
        [value(after[task]) for task in tasks],
        [value(before[task]) for task in tasks],
        seed=derive_seed(0, "measured-gain"),
    )
