"""The outer loop: play groups of episodes, update the agent, publish, and never lose anything.

Pace. At most groups_per_step * (max_staleness + 1) groups are admitted and not yet trained. A step
takes the first groups_per_step groups that are finished, oldest weights first; a slow group keeps
its place but nobody waits for it unless max_staleness is 0. It may so become staler than the
bound: then it is clipped or, if configured, dropped, and counted either way. Nothing else that
finished is discarded.

A step is: one update over its rows (none when no group has anything to teach; the step is then
recorded as skipped), save, commit, publish. A crash at any point resumes at the last committed step
with the learner saved there. Finished episodes of groups that are not spent yet are used again;
episodes that were cut off go on after their last recorded turn with the version that began them, or
start again when it is gone; all others are played with the seeds of the run's plan.

With max_staleness 0 and a learner that samples independently of its neighbours, a resumed run gives
the same weights as an undisturbed one. With more, which groups meet in a step depends on timing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from nestling.agent.episode_result import EpisodeResult
from nestling.core.clock import Clock
from nestling.core.errors import ConfigError, FleetError, LearnerError
from nestling.outer.batch import Batch, DeadEpisode, FinishedGroup, PlayedEpisode, build_batch
from nestling.outer.config import OuterConfig
from nestling.outer.learner import Handle, Learner, LossSpec, LossStats, StepStats
from nestling.outer.plan import EpisodePlan, GroupPlan, plan_digest, plan_group
from nestling.outer.play import EpisodePlayer, OnEpisode, PlayPlan, Stage, first_leaf
from nestling.outer.run_log import Progress, RunLog
from nestling.outer.step_report import StepReport, UpdateStats, step_report

__all__ = ["Measure", "OnStep", "OpenPolicy", "train"]

logger = logging.getLogger(__name__)

Measure = Callable[[int, Handle], Awaitable[None]]
"""Measures a published policy after a step; runs beside training."""
OnStep = Callable[[StepReport], None]
OpenPolicy = Callable[[str], Awaitable[Handle]]
"""A saved learner as a policy to sample, by its reference; raises `LearnerError`."""

_MAX_DEAD_STEPS = 3
"""Consecutive steps without one finished episode after which the machine room must be broken."""


async def train(
    config: OuterConfig,
    *,
    learner: Learner,
    player: EpisodePlayer,
    log: RunLog,
    families: Sequence[str],
    clock: Clock,
    on_step: OnStep | None = None,
    on_episode: OnEpisode | None = None,
    measure: Measure | None = None,
    open_policy: OpenPolicy | None = None,
) -> Progress:
    """Train until `config.steps` steps are committed; picks up where `log` stands.

    Raises `LearnerError`, `StoreError`, `ConfigError` or `FleetError` (nothing finishes any more);
    on these and on cancellation all episodes are cancelled and awaited first, and the run can be
    resumed by calling again with the same arguments and a fresh learner.
    """
    if not families:
        raise ConfigError("no training families; expected at least one name, for example 'ledger'")
    run = _Run(config, learner, player, log, families, clock, on_episode)
    run.on_step, run.measure, run.open_policy = on_step, measure, open_policy
    try:
        return await run.go()
    except BaseExceptionGroup as group:
        raise first_leaf(group) from group


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """The last update of a step and what it reported; None for a skipped step."""

    loss: LossStats
    step: StepStats


class _Run:
    """One call of `train`."""

    on_step: OnStep | None = None
    measure: Measure | None = None
    open_policy: OpenPolicy | None = None

    def __init__(
        self,
        config: OuterConfig,
        learner: Learner,
        player: EpisodePlayer,
        log: RunLog,
        families: Sequence[str],
        clock: Clock,
        on_episode: OnEpisode | None,
    ) -> None:
        self._config = config
        self._learner = learner
        self._player = player
        self._log = log
        self._families = families
        self._clock = clock
        self._stage = Stage(
            log,
            max_parallel_episodes=config.max_parallel_episodes,
            episode_timeout_s=config.episode_timeout_s,
            on_episode=on_episode,
        )
        self._ready: list[FinishedGroup] = []
        self._wake = asyncio.Event()
        self._opening = asyncio.Lock()
        self._earlier: dict[int, Handle] = {}
        """Policies opened again for episodes that began with them before the run was cut off."""
        self._next_group = 0
        self._dead_steps = 0
        self._progress: Progress
        self._handle: Handle

    async def go(self) -> Progress:
        """Every remaining step."""
        await self._restore()
        started = self._clock.monotonic()
        first = self._progress.step
        async with asyncio.TaskGroup() as tasks:
            self._start_measuring(tasks)
            await self._readmit(tasks)
            while self._progress.step < self._config.steps:
                self._admit(tasks)
                begun = self._clock.monotonic()
                groups = await self._take()
                report = await self._step(groups, begun, started, first)
                if self.on_step is not None:
                    self.on_step(report)
                self._start_measuring(tasks)
        return self._progress

    async def _restore(self) -> None:
        progress = await self._log.progress()
        plan = plan_digest(self._config, self._families)
        if progress is not None and progress.plan != plan:
            raise ConfigError(
                f"the run was started with another plan ({progress.plan}); expected {plan}; resume "
                f"with the same seed, groups_per_step, group_size and families, or start a new run"
            )
        if progress is None:
            self._handle = await self._learner.publish()
            ref = await self._learner.save(_name(0))
            progress = Progress(step=0, version=self._handle.version, learner_ref=ref, plan=plan)
            await self._log.commit_step(progress, None, [])
        else:
            await self._learner.load(progress.learner_ref)
            self._handle = await self._learner.publish()
            logger.info("resumed after step %d, version %d", progress.step, progress.version)
        self._progress = progress

    def _start_measuring(self, tasks: asyncio.TaskGroup) -> None:
        every, step = self._config.held_out.every_steps, self._progress.step
        if self.measure is None or every == 0:
            return
        if step % every == 0 or step == self._config.steps:
            tasks.create_task(self._measure_one(step, self._handle), name=f"measure-{step}")

    async def _measure_one(self, step: int, handle: Handle) -> None:
        assert self.measure is not None
        await self.measure(step, handle)

    def _limit(self) -> int:
        """Index of the first group that may not be admitted yet."""
        ahead = self._progress.step + self._config.max_staleness + 1
        return min(self._config.steps, ahead) * self._config.groups_per_step

    async def _readmit(self, tasks: asyncio.TaskGroup) -> None:
        """Groups that were open when the last process ended, with what they had finished."""
        self._next_group = self._limit()
        open_plans = [
            plan_group(self._config, self._families, index)
            for index in range(self._progress.spent_below, self._next_group)
            if not self._progress.is_spent(index)
        ]
        finished: dict[str, list[PlayedEpisode]] = {}
        for episode in await self._log.finished_episodes(open_plans):
            finished.setdefault(episode.plan.group_id, []).append(episode)
        for plan in open_plans:
            self._open(tasks, plan, finished.get(plan.group_id, []))

    def _admit(self, tasks: asyncio.TaskGroup) -> None:
        while self._next_group < self._limit():
            self._open(tasks, plan_group(self._config, self._families, self._next_group), [])
            self._next_group += 1

    def _open(
        self, tasks: asyncio.TaskGroup, plan: GroupPlan, finished: list[PlayedEpisode]
    ) -> None:
        tasks.create_task(self._play_group(plan, finished), name=f"group-{plan.index}")

    async def _play_group(self, plan: GroupPlan, finished: list[PlayedEpisode]) -> None:
        begun = await self._log.group_opened(plan)
        reused = {episode.plan.member for episode in finished}
        async with asyncio.TaskGroup() as tasks:
            playing = [
                tasks.create_task(
                    self._stage.play(one, partial(self._policy, begun.get(one.episode_id))),
                    name=one.episode_id,
                )
                for one in plan.episodes
                if one.member not in reused
            ]
        results: list[PlayedEpisode | DeadEpisode] = [
            *finished,
            *(task.result() for task in playing),
        ]
        results.sort(key=lambda one: one.plan.member)
        self._ready.append(
            FinishedGroup(
                plan=plan,
                episodes=tuple(one for one in results if isinstance(one, PlayedEpisode)),
                dead=tuple(one for one in results if isinstance(one, DeadEpisode)),
            )
        )
        self._wake.set()

    async def _policy(self, begun_with: int | None) -> tuple[int, PlayPlan]:
        """The newest policy when a place is free: less stale than that of the group's admission.

        An episode that was cut off goes on with the version that began it, if that can be had.
        """
        handle = await self._opened(begun_with) or self._handle

        async def play(plan: EpisodePlan) -> EpisodeResult:
            return await self._player.play(plan, handle)

        return handle.version, play

    async def _opened(self, version: int | None) -> Handle | None:
        """The policy with this version; None when there is none any more."""
        if version is None:
            return None
        if version == self._handle.version:
            return self._handle
        async with self._opening:  # one copy, however many episodes ask for it
            if version in self._earlier or self.open_policy is None:
                return self._earlier.get(version)
            ref = await self._log.learner_ref(version)
            if ref is None:
                return None
            try:
                handle = await self.open_policy(ref)
            except LearnerError as error:
                logger.warning(
                    "version %d cannot be opened, its episodes restart: %s", version, error
                )
                return None
            if handle.version != version:
                return None
            self._earlier[version] = handle
            return handle

    async def _take(self) -> list[FinishedGroup]:
        """The next step's groups: those with the oldest weights among the finished ones."""
        wanted = self._config.groups_per_step
        while len(self._ready) < wanted:
            self._wake.clear()
            await self._wake.wait()
        self._ready.sort(key=lambda group: (group.version, group.plan.index))
        taken, self._ready = self._ready[:wanted], self._ready[wanted:]
        return taken

    async def _step(
        self, groups: list[FinishedGroup], begun: float, started: float, first: int
    ) -> StepReport:
        config, progress = self._config, self._progress
        self._count_dead(groups)
        batch = build_batch(
            groups,
            version=progress.version,
            max_staleness=config.max_staleness * config.epochs,
            over_stale=config.over_stale,
            std_normalise=config.std_normalise,
        )
        trained = self._clock.monotonic()
        update = await self._update(batch)
        step = progress.step + 1
        ref = await self._learner.save(_name(step)) if update else progress.learner_ref
        now = self._clock.monotonic()
        below, beyond = progress.spend(group.plan.index for group in groups)
        progress = Progress(
            step=step,
            version=update.step.version if update else progress.version,
            learner_ref=ref,
            plan=progress.plan,
            spent_below=below,
            spent_beyond=beyond,
        )
        report = step_report(
            config,
            step=step,
            groups=groups,
            batch=batch,
            update=UpdateStats.of(update.loss, update.step) if update else None,
            version=progress.version,
            seconds=(now - begun, now - trained),
            eta_s=(now - started) / (step - first) * (config.steps - step),
        )
        await self._log.commit_step(progress, report, groups)
        self._progress = progress
        if update:
            self._handle = await self._learner.publish()
        self._earlier.clear()
        return report

    def _count_dead(self, groups: list[FinishedGroup]) -> None:
        if any(group.episodes for group in groups):
            self._dead_steps = 0
            return
        self._dead_steps += 1
        if self._dead_steps >= _MAX_DEAD_STEPS:
            reason = next((one.reason for group in groups for one in group.dead), "unknown")
            raise FleetError(
                f"no episode of the last {self._dead_steps} steps finished, the last one died of: "
                f"{reason}; expected at least one; fix the cause and resume the run"
            )

    async def _update(self, batch: Batch) -> _Update | None:
        config = self._config
        if not batch.rows:
            return None
        loss = LossSpec(
            # Unclipped ratios of very stale rows are what makes training collapse.
            kind="ppo_clip" if batch.over_stale else config.loss,
            clip=config.clip,
            kl_coef=config.kl_coef,
            temperature=config.temperature,
        )
        version = self._progress.version
        for epoch in range(config.epochs):
            stats = await self._learner.forward_backward(batch.rows, loss)
            done = await self._learner.optim_step(config.learning_rate_at(version + epoch))
        return _Update(loss=stats, step=done)


def _name(step: int) -> str:
    return f"step-{step:06d}"
