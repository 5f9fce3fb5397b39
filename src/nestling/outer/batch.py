"""Finished groups become training rows. Pure: no clock, no randomness, no I/O.

The advantage of an episode is its reward minus the mean reward of its group, the same for every
token it sampled (Shao et al. 2024, without the division by the standard deviation unless asked).
A group in which every reward is equal teaches nothing: it is counted and left out, and a step left
without rows makes no update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nestling.agent.episode_result import EpisodeResult
from nestling.outer.learner import TrainRow
from nestling.outer.plan import EpisodePlan, GroupPlan

__all__ = ["Batch", "DeadEpisode", "FinishedGroup", "PlayedEpisode", "build_batch"]

_SAME_REWARD = 1e-9
"""Rewards closer than this are equal; real differences are far larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """An episode that came to its end, well or badly."""

    plan: EpisodePlan
    version: int
    """Updates in the weights that played it."""
    result: EpisodeResult


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadEpisode:
    """An episode that broke down through no decision of the agent; it has no reward."""

    plan: EpisodePlan
    version: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """What is left of a group when nobody in it plays any more, members in order."""

    plan: GroupPlan
    episodes: tuple[PlayedEpisode, ...]
    dead: tuple[DeadEpisode, ...] = ()

    @property
    def version(self) -> int:
        """Version of its oldest episode."""
        played = [one.version for one in self.episodes]
        return min(played + [one.version for one in self.dead], default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows of one update and what became of each group; group lists hold indices."""

    rows: tuple[TrainRow, ...]
    """Ordered by group and member, whatever order they finished in."""
    used: tuple[int, ...] = ()
    constant: tuple[int, ...] = ()
    """Every reward equal."""
    short: tuple[int, ...] = ()
    """Fewer than two episodes left, so nothing to compare, or no sampled token in any."""
    dropped: tuple[int, ...] = ()
    """Too stale and left out by policy."""
    over_stale: tuple[int, ...] = ()
    """Too stale and used all the same."""


def build_batch(
    groups: Sequence[FinishedGroup],
    *,
    version: int,
    max_staleness: int,
    over_stale: Literal["clip", "drop"],
    std_normalise: bool,
) -> Batch:
    """Rows for the next update of weights `version`; `max_staleness` counts updates."""
    rows: list[TrainRow] = []
    fate: dict[str, list[int]] = {
        name: [] for name in ("used", "constant", "short", "dropped", "over_stale")
    }
    for group in sorted(groups, key=lambda one: one.plan.index):
        index = group.plan.index
        group_rows = _group_rows(group, version=version, std_normalise=std_normalise)
        late = version - group.version > max_staleness
        if _is_constant(group):
            fate["constant"].append(index)
        elif not group_rows:
            fate["short"].append(index)
        elif late and over_stale == "drop":
            fate["dropped"].append(index)
        else:
            rows.extend(group_rows)
            fate["used"].append(index)
            if late:
                fate["over_stale"].append(index)
    return Batch(rows=tuple(rows), **{name: tuple(found) for name, found in fate.items()})


def _is_constant(group: FinishedGroup) -> bool:
    rewards = [episode.result.reward for episode in group.episodes]
    return len(rewards) > 1 and max(rewards) - min(rewards) < _SAME_REWARD


def _group_rows(group: FinishedGroup, *, version: int, std_normalise: bool) -> list[TrainRow]:
    rewards = [episode.result.reward for episode in group.episodes]
    if len(rewards) < 2:
        return []
    centre = sum(rewards) / len(rewards)
    scale = 1.0
    if std_normalise:
        variance = sum((reward - centre) ** 2 for reward in rewards) / len(rewards)
        scale = max(variance**0.5, _SAME_REWARD)
    rows = []
    for episode in sorted(group.episodes, key=lambda one: one.plan.member):
        trajectory = episode.result.trajectory
        if trajectory is None or not any(trajectory.sampled):
            continue
        rows.append(
            TrainRow(
                ids=list(trajectory.ids),
                sampled=list(trajectory.sampled),
                logprobs=list(trajectory.logprobs),
                advantage=(episode.result.reward - centre) / scale,
                staleness=version - episode.version,
                group=group.plan.index,
                member=episode.plan.member,
            )
        )
    return rows
