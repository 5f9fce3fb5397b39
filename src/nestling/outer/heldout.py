"""Measure policies on the same tasks and seeds: checkpoints, reference policies, any family.

An arm is one policy. All arms play the same episodes, so differences are paired: the interval and
the p-value are those of the mean difference per pair. A pair counts only when both arms finished it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from nestling.agent.episode_result import EpisodeResult
from nestling.core.errors import ConfigError
from nestling.core.seeds import derive_seed
from nestling.outer import stats
from nestling.outer.batch import DeadEpisode, PlayedEpisode
from nestling.outer.config import HeldOutConfig, OuterConfig
from nestling.outer.episode_facts import facts_of, summarise
from nestling.outer.learner import Handle
from nestling.outer.plan import EpisodePlan, GroupPlan, measurement_group
from nestling.outer.play import EpisodePlayer, PlayPlan, Stage, first_leaf
from nestling.outer.run_log import RunLog
from nestling.outer.stats import Estimate
from nestling.outer.sweep_report import ALL_FAMILIES, ArmResult, Comparison, Sweep

__all__ = ["UNTRAINED", "Arm", "HeldOutMeasure", "sweep"]


UNTRAINED = "untrained"
"""Arm of the agent before its first update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One policy to measure."""

    name: str
    """Unique within the run and stable: episodes already recorded under it are not played again."""
    play: PlayPlan
    step: int = 0
    """Outer step of a checkpoint; 0 for reference policies and the untrained agent."""
    version: int = 0


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


class HeldOutMeasure:
    """What `train` calls to measure a policy on held-out families: a sweep, recorded in the log.

    Every sweep has the checkpoint, the untrained agent and the reference arms, each compared with
    the untrained agent and the references. Only the checkpoint's episodes are new after the first
    sweep. `open_untrained` gives the untrained policy when some of its episodes are still missing.
    """

    def __init__(
        self,
        player: EpisodePlayer,
        *,
        config: OuterConfig,
        families: Sequence[str],
        log: RunLog,
        open_untrained: Callable[[], Awaitable[Handle]],
        references: Sequence[Arm] = (),
        on_sweep: Callable[[int, Sweep], None] | None = None,
    ) -> None:
        self._player = player
        self._config = config
        self._families = families
        self._log = log
        self._open_untrained = open_untrained
        self._references = references
        self._on_sweep = on_sweep
        self._turn = asyncio.Lock()  # one sweep at a time: they share arms that must play once

    async def __call__(self, step: int, handle: Handle) -> None:
        """Measure the policy after `step`."""
        async with self._turn:
            arms = [*self._references, self._untrained()]
            if step > 0:
                arms.append(self._checkpoint(step, handle))
            found = await sweep(
                arms,
                self._families,
                config=self._config.held_out,
                seed=derive_seed(self._config.seed, "held-out"),
                log=self._log,
                against=[UNTRAINED, *(arm.name for arm in self._references)],
                max_parallel_episodes=self._config.max_parallel_episodes,
                episode_timeout_s=self._config.episode_timeout_s,
            )
            await self._log.sweep_done(step, found)
        if self._on_sweep is not None:
            self._on_sweep(step, found)

    def _checkpoint(self, step: int, handle: Handle) -> Arm:
        async def play(plan: EpisodePlan) -> EpisodeResult:
            return await self._player.play(plan, handle)

        return Arm(name=f"step-{step:06d}", play=play, step=step, version=handle.version)

    def _untrained(self) -> Arm:
        opened: list[Handle] = []
        opening = asyncio.Lock()  # one copy, however many episodes begin at once

        async def play(plan: EpisodePlan) -> EpisodeResult:
            async with opening:
                if not opened:
                    opened.append(await self._open_untrained())
            return await self._player.play(plan, opened[0])

        return Arm(name=UNTRAINED, play=play)


_Episodes = list[PlayedEpisode | DeadEpisode]


async def _play_arm(stage: Stage, log: RunLog, arm: Arm, group: GroupPlan) -> _Episodes:
    """All episodes of one arm and family, in order; only those not recorded yet are played."""

    async def policy() -> tuple[int, PlayPlan]:
        return arm.version, arm.play

    await log.group_opened(group)
    known = {one.plan.episode_id: one for one in await log.finished_episodes([group])}
    async with asyncio.TaskGroup() as tasks:
        fresh = [
            tasks.create_task(stage.play(plan, policy))
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
