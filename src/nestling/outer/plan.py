"""Which episodes a run plays: a pure function of the run's seed, so a resumed run plays the same.

Group number i belongs to step i // groups_per_step and takes training family i modulo their number.
All members of a group get the same task; only their policy seeds differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nestling.core.seeds import derive_seed
from nestling.outer.config import OuterConfig

__all__ = ["EpisodePlan", "GroupPlan", "measurement_group", "plan_digest", "plan_group"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePlan:
    """One episode to play."""

    episode_id: str
    """Unique within the run and the same after a resume."""
    group_id: str
    member: int
    family: str
    task_seed: int
    """Picks the task (its dev examples and the job's seeds); equal within a group."""
    policy_seed: int
    """Drives the policy's sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Episodes that are judged together: one task tried often, or one family of a measurement."""

    group_id: str
    """Unique within the run and the same after a resume."""
    purpose: Literal["train", "measure"]
    index: int
    """Place in the run; 0 for measurements, where it means nothing."""
    step: int
    """The step it is planned for, or the step whose policy is measured."""
    family: str
    seed: int
    episodes: tuple[EpisodePlan, ...]


def plan_group(config: OuterConfig, families: Sequence[str], index: int) -> GroupPlan:
    """The group with this index."""
    family = families[index % len(families)]
    step, place = divmod(index, config.groups_per_step)
    task_seed = derive_seed(config.seed, "task", step, place)
    group_id = f"train/{index:06d}"
    episodes = tuple(
        EpisodePlan(
            episode_id=f"{group_id}/{member:03d}",
            group_id=group_id,
            member=member,
            family=family,
            task_seed=task_seed,
            policy_seed=derive_seed(config.seed, "policy", step, place, member),
        )
        for member in range(config.group_size)
    )
    return GroupPlan(
        group_id=group_id,
        purpose="train",
        index=index,
        step=step,
        family=family,
        seed=task_seed,
        episodes=episodes,
    )


def plan_digest(config: OuterConfig, families: Sequence[str]) -> str:
    """Equal for runs that play the same episodes; more steps only make the plan longer."""
    parts: tuple[str | int, ...] = (
        config.seed,
        config.groups_per_step,
        config.group_size,
        *families,
    )
    return f"{derive_seed(0, 'plan', *parts):016x}"


def measurement_group(seed: int, *, arm: str, step: int, family: str, episodes: int) -> GroupPlan:
    """Episodes that measure one arm on one family.

    Task and policy seeds depend on `seed`, family and place alone: all arms meet the same ones, so
    that their rewards can be compared pair by pair. More episodes extend the list.
    """
    group_id = f"measure/{arm}/{family}"
    return GroupPlan(
        group_id=group_id,
        purpose="measure",
        index=0,
        step=step,
        family=family,
        seed=seed,
        episodes=tuple(
            EpisodePlan(
                episode_id=f"{group_id}/{member:05d}",
                group_id=group_id,
                member=member,
                family=family,
                task_seed=derive_seed(seed, "measure-task", family, member),
                policy_seed=derive_seed(seed, "measure-policy", family, member),
            )
            for member in range(episodes)
        ),
    )
