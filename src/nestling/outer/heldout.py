"""Measure policies on the same tasks and seeds: checkpoints, reference policies, any family.

An arm is one policy. All arms play the same episodes, so differences are paired: the interval and
the p-value are those of the mean difference per pair. A pair counts only when both arms finished it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from nestling.core.errors import ConfigError
from nestling.core.frozen import Frozen
from nestling.core.seeds import derive_seed
from nestling.outer import stats
from nestling.outer.batch import DeadEpisode, PlayedEpisode
from nestling.outer.config import HeldOutConfig
from nestling.outer.episode_facts import Summary, facts_of, summarise
from nestling.outer.plan import GroupPlan, measurement_group
from nestling.outer.play import PlayPlan, Stage, first_leaf
from nestling.outer.run_log import RunLog
from nestling.outer.stats import Estimate

__all__ = ["ALL_FAMILIES", "Arm", "ArmResult", "Comparison", "Sweep", "sweep"]

ALL_FAMILIES = "all"
"""Name of the row that pools every family of a sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One policy to measure."""

    name: str
    """Unique within the run and stable: episodes already recorded under it are not played again."""
    play: PlayPlan
    step: int = 0
    """Outer step of a checkpoint; 0 for reference policies and the untrained agent."""
    version: int = 0


class ArmResult(Frozen):
    """One arm on one family, or on all of them."""

    arm: str
    step: int
    family: str
    summary: Summary | None
    """None when no episode finished."""
    dead: int
    """Episodes that broke down and are missing from the summary."""


class Comparison(Frozen):
    """Reward of one arm minus reward of another on the same episodes."""

    arm: str
    against: str
    family: str
    difference: Estimate
    """Its n counts pairs."""


class Sweep(Frozen):
    """Everything one sweep found."""

    seed: int
    results: tuple[ArmResult, ...]
    comparisons: tuple[Comparison, ...]

    def result(self, arm: str, family: str = ALL_FAMILIES) -> ArmResult:
        """The row of this arm and family; `KeyError` when it was not measured."""
        for one in self.results:
            if (one.arm, one.family) == (arm, family):
                return one
        raise KeyError(f"arm {arm!r} was not measured on {family!r}")

    def comparison(self, arm: str, against: str, family: str = ALL_FAMILIES) -> Comparison | None:
        """The paired difference; None when no pair finished or it was not asked for."""
        for one in self.comparisons:
            if (one.arm, one.against, one.family) == (arm, against, family):
                return one
        return None


async def sweep(
    arms: Sequence[Arm],
    families: Sequence[str],
    *,
    config: HeldOutConfig,
    seed: int,
    log: RunLog,
    against: Sequence[str] = (),
    max_parallel_episodes: int = 8,
    episode_timeout_s: float = 3_600.0,
) -> Sweep:
    """Play every arm on every family and compare it with each arm named in `against`.

    Finished episodes are recorded and reused, so a sweep that was cut off continues; one broken
    episode is counted, not fatal. Raises `LearnerError`, `StoreError` or `ConfigError`.
    """
    names = [arm.name for arm in arms]
    if len(set(names)) != len(names):
        raise ConfigError(f"arms {names} are not unique; give each arm its own name")
    if unknown := set(against) - set(names):
        raise ConfigError(f"cannot compare with {sorted(unknown)}; expected some of {names}")
    stage = Stage(
        log,
        max_parallel_episodes=max_parallel_episodes,
        episode_timeout_s=episode_timeout_s,
    )
    plans = [
        (
            arm,
            measurement_group(
                seed, arm=arm.name, step=arm.step, family=family, episodes=config.episodes
            ),
        )
        for arm in arms
        for family in families
    ]
    try:
        async with asyncio.TaskGroup() as tasks:
            playing = [tasks.create_task(_play_arm(stage, log, arm, plan)) for arm, plan in plans]
    except BaseExceptionGroup as group:
        raise first_leaf(group) from group
    played = {
        (arm.name, plan.family): task.result()
        for (arm, plan), task in zip(plans, playing, strict=True)
    }
    return _evaluate(arms, families, played, config=config, seed=seed, against=against)


_Episodes = list[PlayedEpisode | DeadEpisode]


async def _play_arm(stage: Stage, log: RunLog, arm: Arm, group: GroupPlan) -> _Episodes:
    """All episodes of one arm and family, in order; only those not recorded yet are played."""
    await log.group_opened(group)
    known = {one.plan.episode_id: one for one in await log.finished_episodes([group])}
    async with asyncio.TaskGroup() as tasks:
        fresh = [
            tasks.create_task(stage.play(plan, lambda: (arm.version, arm.play)))
            for plan in group.episodes
            if plan.episode_id not in known
        ]
    episodes = [*known.values(), *(task.result() for task in fresh)]
    return sorted(episodes, key=lambda one: one.plan.member)


def _evaluate(
    arms: Sequence[Arm],
    families: Sequence[str],
    played: dict[tuple[str, str], _Episodes],
    *,
    config: HeldOutConfig,
    seed: int,
    against: Sequence[str],
) -> Sweep:
    scopes = [(family, [family]) for family in families]
    if len(families) > 1:
        scopes.append((ALL_FAMILIES, list(families)))
    results: list[ArmResult] = []
    comparisons: list[Comparison] = []
    for scope, members in scopes:
        found = {arm.name: [one for f in members for one in played[arm.name, f]] for arm in arms}
        for arm in arms:
            results.append(_arm_result(arm, scope, found[arm.name], config=config, seed=seed))
            for other in against:
                if other == arm.name:
                    continue
                difference = _difference(found[arm.name], found[other], config=config, seed=seed)
                if difference is not None:
                    comparisons.append(
                        Comparison(arm=arm.name, against=other, family=scope, difference=difference)
                    )
    if len(families) == 1:
        # One family is also all there is, so that callers need not know how many were asked for.
        results += [one.model_copy(update={"family": ALL_FAMILIES}) for one in results]
        comparisons += [one.model_copy(update={"family": ALL_FAMILIES}) for one in comparisons]
    return Sweep(seed=seed, results=tuple(results), comparisons=tuple(comparisons))


def _arm_result(
    arm: Arm, family: str, episodes: _Episodes, *, config: HeldOutConfig, seed: int
) -> ArmResult:
    finished = [one for one in episodes if isinstance(one, PlayedEpisode)]
    return ArmResult(
        arm=arm.name,
        step=arm.step,
        family=family,
        summary=summarise(
            [[facts_of(one.result)] for one in finished],
            seed=derive_seed(seed, "interval", arm.name, family),
            confidence=config.confidence,
            resamples=config.resamples,
        ),
        dead=len(episodes) - len(finished),
    )


def _difference(
    first: _Episodes, second: _Episodes, *, config: HeldOutConfig, seed: int
) -> Estimate | None:
    rewards = [
        {
            (one.plan.family, one.plan.member): one.result.reward
            for one in episodes
            if isinstance(one, PlayedEpisode)
        }
        for episodes in (first, second)
    ]
    pairs = sorted(rewards[0].keys() & rewards[1].keys())
    return stats.paired_difference(
        [rewards[0][pair] for pair in pairs],
        [rewards[1][pair] for pair in pairs],
        seed=derive_seed(seed, "difference"),
        confidence=config.confidence,
        resamples=config.resamples,
    )
