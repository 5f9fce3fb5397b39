"""The run store as the outer loop's memory, and what others read of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

from pydantic import ValidationError

from nestling.agent.episode_result import EpisodeResult
from nestling.agent.policy import AgentTurn, Trajectory
from nestling.agent.turn_log import RecordedTurn, storable
from nestling.core.errors import StoreError
from nestling.outer.batch import DeadEpisode, FinishedGroup, PlayedEpisode
from nestling.outer.plan import EpisodePlan, GroupPlan
from nestling.outer.run_log import Progress
from nestling.outer.step_report import StepReport
from nestling.outer.sweep_report import Sweep
from nestling.store.episodes import TrajectoryRecord, TurnRecord
from nestling.store.group_commit import GroupCommit
from nestling.store.run_store import RunStore

__all__ = [
    "PROGRESS_KEY",
    "Checkpoint",
    "StoreLog",
    "StoreTurnLog",
    "checkpoints",
    "step_reports",
    "sweeps",
]

_T = TypeVar("_T")

PROGRESS_KEY = "outer.progress"
"""Meta key under which the last committed state is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One saved learner."""

    step: int
    """0 is the untrained agent."""
    version: int
    learner_ref: str
    """What `Learner.load` takes."""


def step_reports(store: RunStore) -> list[StepReport]:
    """Every committed step, oldest first."""
    return [
        StepReport.model_validate(step.summary)
        for step in store.progress.steps()
        if step.state == "done"
    ]


def checkpoints(store: RunStore) -> list[Checkpoint]:
    """Every saved learner, oldest first; a skipped step saves none."""
    return [
        Checkpoint(step=one.step, version=one.version, learner_ref=one.state_ref)
        for one in store.learner.all()
        if one.state_ref is not None
    ]


def sweeps(store: RunStore) -> dict[int, Sweep]:
    """Every recorded sweep by the step it followed."""
    texts = {
        step: store.meta(_sweep_key(step)) for step in range(store.progress.num_done_steps() + 1)
    }
    return {step: Sweep.model_validate_json(text) for step, text in texts.items() if text}


class StoreLog:
    """Satisfies `RunLog` through the store's writer thread; `policy` names the agent in the rows."""

    def __init__(self, writer: GroupCommit, *, policy: str = "learner") -> None:
        self._writer = writer
        self._store = writer.store
        self._policy = policy

    async def progress(self) -> Progress | None:
        """The last committed state; None for a new run."""
        return await self._writer.run(self._progress)

    async def finished_episodes(self, groups: Sequence[GroupPlan]) -> list[PlayedEpisode]:
        """Episodes of these groups that finished, with their tokens."""
        return await self._writer.run(lambda: self._finished_episodes(groups))

    async def learner_ref(self, version: int) -> str | None:
        """Where the weights of a version are saved."""
        found = await self._writer.run(lambda: self._store.learner.get(version))
        return None if found is None else found.state_ref

    def turn_log(self, plan: EpisodePlan) -> StoreTurnLog:
        """The memory of the turns of an episode that has been started."""
        return StoreTurnLog(self._writer, plan.episode_id)

    async def group_opened(self, group: GroupPlan) -> dict[str, int]:
        """A group was admitted; returns its episodes that were cut off after a turn, by version."""
        return await self._write(lambda: self._group_opened(group))

    async def episode_started(self, plan: EpisodePlan, version: int) -> None:
        """An episode begins; a second start keeps the row, and its turns if the version is theirs."""
        await self._write(lambda: self._episode_started(plan, version))

    async def episode_finished(self, episode: PlayedEpisode) -> None:
        """Result, reward, attempts and tokens in one transaction."""
        await self._write(lambda: self._episode_finished(episode))

    async def episode_died(self, episode: DeadEpisode) -> None:
        """Only an event: the row stays open for another try."""
        episode_id, data = episode.plan.episode_id, {"reason": episode.reason}
        await self._write(lambda: self._store.events.append("episode.died", episode_id, data))

    async def commit_step(
        self, progress: Progress, report: StepReport | None, groups: Sequence[FinishedGroup]
    ) -> None:
        """Step, learner version, groups and deaths in one transaction."""
        await self._write(lambda: self._commit_step(progress, report, groups))

    async def sweep_done(self, step: int, sweep: Sweep) -> None:
        """Keep what a sweep after `step` found."""
        text = sweep.model_dump_json()
        await self._write(lambda: self._store.set_meta(_sweep_key(step), text))

    async def _write(self, change: Callable[[], _T]) -> _T:
        return await _made(self._writer, change)

    def _progress(self) -> Progress | None:
        text = self._store.meta(PROGRESS_KEY)
        if text is None:
            return None
        try:
            return Progress.model_validate_json(text)
        except ValidationError as error:
            raise StoreError(
                f"{self._store.path}: {PROGRESS_KEY} is not a progress record: {error}; "
                f"restore a backup or start a new run"
            ) from error

    def _finished_episodes(self, groups: Sequence[GroupPlan]) -> list[PlayedEpisode]:
        found: list[PlayedEpisode] = []
        for group in groups:
            plans = {plan.episode_id: plan for plan in group.episodes}
            records = self._store.episodes.all(group_id=group.group_id, state="finished")
            found += [
                self._episode(plans[record.id], record.summary)
                for record in records
                if record.id in plans
            ]
        return found

    def _group_opened(self, group: GroupPlan) -> dict[str, int]:
        progress = self._progress()
        self._store.progress.open_group(
            group.group_id,
            purpose=group.purpose,
            step=group.step,
            family=group.family,
            seed=group.seed,
            size=len(group.episodes),
            learner_version=progress.version if progress else None,
        )
        episodes = self._store.episodes
        return {
            one.id: one.learner_version
            for one in episodes.all(group_id=group.group_id, state="running")
            if one.learner_version is not None and episodes.num_turns(one.id)
        }

    def _episode_started(self, plan: EpisodePlan, version: int) -> None:
        with self._store.transaction():
            record = self._store.episodes.start(
                plan.episode_id,
                group_id=plan.group_id,
                idx=plan.member,
                family=plan.family,
                policy=self._policy,
                seed=plan.policy_seed,
                learner_version=version,
            )
            if record.learner_version != version:
                self._store.episodes.restart(plan.episode_id, learner_version=version)

    def _episode_finished(self, episode: PlayedEpisode) -> None:
        result, episode_id = episode.result, episode.plan.episode_id
        with self._store.transaction():
            for attempt in result.attempts:
                self._store.episodes.add_attempt(
                    episode_id,
                    attempt.number,
                    job_hash=attempt.job_hash,
                    accepted=attempt.ok,
                    problems=attempt.model_dump(mode="json")["problems"],
                )
            answer = result.turns[-1].result if result.turns else None
            if answer is not None:
                last = result.num_turns - 1
                self._store.episodes.add_observation(episode_id, last, storable(answer))
            self._store.episodes.finish(
                episode_id,
                outcome=result.outcome_code,
                kind=result.reward_kind,
                reward=result.reward,
                terms={kind: terms.model_dump(mode="json") for kind, terms in result.terms.items()},
                summary=_summary(episode),
                trajectory=_tokens(result.trajectory),
            )

    def _commit_step(
        self, progress: Progress, report: StepReport | None, groups: Sequence[FinishedGroup]
    ) -> None:
        store = self._store
        with store.transaction():
            for group in groups:
                for dead in group.dead:
                    store.episodes.fail(dead.plan.episode_id, dead.reason)
                group_id = group.plan.group_id
                is_used = report is not None and report.group_fates[group_id] == "used"
                store.progress.mark_group(group_id, "used" if is_used else "dropped", progress.step)
            if report is None or report.update is not None:
                store.learner.publish(
                    progress.version,
                    step=progress.step,
                    handle=progress.learner_ref,
                    state_ref=progress.learner_ref,
                )
            if report is not None:
                store.progress.start_step(progress.step)
                store.progress.finish_step(
                    progress.step,
                    learner_version=progress.version,
                    summary=report.model_dump(mode="json"),
                )
            store.set_meta(PROGRESS_KEY, progress.model_dump_json())

    def _episode(self, plan: EpisodePlan, summary: dict[str, Any]) -> PlayedEpisode:
        try:
            result = EpisodeResult.model_validate(summary["result"])
            version, tokens = int(summary["version"]), summary["tokens"]
        except (KeyError, TypeError, ValidationError) as error:
            raise StoreError(
                f"{self._store.path}: episode {plan.episode_id} has no readable result: {error}; "
                f"restore a backup or start a new run"
            ) from error
        if tokens is not None:
            record = self._store.episodes.trajectory(plan.episode_id)
            if record is None:
                raise StoreError(
                    f"{self._store.path}: the tokens of episode {plan.episode_id} are missing; "
                    f"restore a backup or start a new run"
                )
            trajectory = Trajectory(
                ids=tuple(record.ids),
                sampled=tuple(record.sampled),
                logprobs=tuple(record.logprobs),
                **tokens,
            )
            result = result.model_copy(update={"trajectory": trajectory})
        return PlayedEpisode(plan=plan, version=version, result=result)


class StoreTurnLog:
    """Satisfies `TurnLog` for one episode: a turn is one small durable write."""

    def __init__(self, writer: GroupCommit, episode_id: str) -> None:
        self._writer = writer
        self._store = writer.store
        self._episode_id = episode_id
        self._num_kept = 0

    async def recorded(self) -> list[RecordedTurn]:
        """Turns of earlier tries up to the first that is missing or torn."""
        rows = await self._writer.run(lambda: self._store.episodes.turns(self._episode_id))
        self._num_kept = len(rows)
        whole = takewhile(lambda place: _is_whole(*place), enumerate(rows))
        return [_recorded(row) for _, row in whole]

    async def record(self, number: int, turn: AgentTurn, answer_before: str | None) -> None:
        """Keep a turn and the answer to the one before it, replacing what had been said instead."""
        replaces = number < self._num_kept
        self._num_kept = number + 1
        await _made(self._writer, lambda: self._record(number, turn, answer_before, replaces))

    def _record(
        self, number: int, turn: AgentTurn, answer_before: str | None, replaces: bool
    ) -> None:
        episodes, episode_id = self._store.episodes, self._episode_id
        with self._store.transaction():
            if replaces:
                episodes.drop_turns(episode_id, number)
            if answer_before is not None:
                episodes.add_observation(episode_id, number - 1, answer_before)
            episodes.add_turn(
                episode_id,
                number,
                text=storable(turn.text),
                truncated=turn.truncated,
                ids=turn.ids or None,
                logprobs=turn.logprobs or None,
                learner_version=episodes.get(episode_id).learner_version,
            )


async def _made(writer: GroupCommit, change: Callable[[], _T]) -> _T:
    """A change that was handed in is made even when the caller is cancelled meanwhile."""
    return await asyncio.shield(asyncio.wrap_future(writer.submit(change)))


def _is_whole(place: int, row: TurnRecord) -> bool:
    return row.idx == place and len(row.ids or ()) == len(row.logprobs or ())


def _recorded(row: TurnRecord) -> RecordedTurn:
    turn = AgentTurn(
        text=row.text,
        ids=tuple(row.ids or ()),
        logprobs=tuple(row.logprobs or ()),
        truncated=row.truncated,
    )
    return RecordedTurn(turn=turn, answer=row.observation)


def _sweep_key(step: int) -> str:
    return f"outer.sweep.{step:06d}"


def _summary(episode: PlayedEpisode) -> dict[str, Any]:
    """The result as JSON; tokens are kept apart, packed."""
    trajectory = episode.result.trajectory
    return {
        "version": episode.version,
        "result": episode.result.model_dump(mode="json", exclude={"trajectory"}),
        "tokens": None
        if trajectory is None
        else {"prompt_len": trajectory.prompt_len, "temperature": trajectory.temperature},
    }


def _tokens(trajectory: Trajectory | None) -> TrajectoryRecord | None:
    if trajectory is None:
        return None
    return TrajectoryRecord(
        ids=list(trajectory.ids),
        sampled=list(trajectory.sampled),
        logprobs=list(trajectory.logprobs),
    )
