"""The groups of a step: who played, what it earned, and whether it taught anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nestling.dash.live_run import RunView
from nestling.report.run_data import EpisodeRow, StepRow

__all__ = ["GroupView", "groups_of", "mean_reward", "waiting_groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """Episodes of the same task."""

    id: str
    family: str
    fate: str
    """used, constant, short, dropped; of a waiting group its state."""
    size: int
    members: tuple[EpisodeRow, ...]
    """Finished ones."""
    running: tuple[str, ...]
    """Ids of those that are being played."""
    mean: float | None
    version: int | None

    @property
    def spread(self) -> float | None:
        """Highest minus lowest reward: what there is to learn from."""
        rewards = [one.reward for one in self.members]
        return max(rewards) - min(rewards) if rewards else None


def groups_of(view: RunView, row: StepRow) -> list[GroupView]:
    """Groups that a step took up, in the order they were opened."""
    fates = row.report.group_fates
    return [
        _group(view, record.id, record.family, fate=fates[record.id], size=record.size)
        for record in view.groups
        if record.id in fates
    ]


def waiting_groups(view: RunView) -> list[GroupView]:
    """Training groups that no step has taken up yet."""
    return [
        _group(view, record.id, record.family, fate=record.state, size=record.size)
        for record in view.groups
        if record.purpose == "train" and record.state in ("open", "complete")
    ]


def mean_reward(members: Sequence[EpisodeRow]) -> float | None:
    """What each member is compared with."""
    rewards = [one.reward for one in members]
    return sum(rewards) / len(rewards) if rewards else None


def _group(view: RunView, group_id: str, family: str, *, fate: str, size: int) -> GroupView:
    members = tuple(one for one in view.data.episodes if one.group_id == group_id)
    return GroupView(
        id=group_id,
        family=family,
        fate=fate,
        size=size,
        members=members,
        running=tuple(one.id for one in view.running if one.group_id == group_id),
        mean=mean_reward(members),
        version=min((one.version for one in members if one.version is not None), default=None),
    )
