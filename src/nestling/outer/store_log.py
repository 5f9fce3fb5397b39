"""The run store as the outer loop's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from nestling.agent.episode_result import EpisodeResult
from nestling.agent.policy import Trajectory
from nestling.core.errors import StoreError
from nestling.outer.batch import DeadEpisode, FinishedGroup, PlayedEpisode
from nestling.outer.plan import EpisodePlan, GroupPlan
from nestling.outer.run_log import Progress
from nestling.outer.step_report import StepReport
from nestling.store.episodes import TrajectoryRecord
from nestling.store.run_store import RunStore

__all__ = ["PROGRESS_KEY", "StoreLog"]

PROGRESS_KEY = "outer.progress"
"""Meta key under which the last committed state is kept."""


class StoreLog:
    """Satisfies `RunLog`; `policy` names the agent in episode rows."""

    def __init__(self, store: RunStore, *, policy: str = "learner") -> None:
        self._store = store
        self._policy = policy

    def progress(self) -> Progress | None:
        """The last committed state; None for a new run."""
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

    def reports(self) -> list[StepReport]:
        """Every committed step, oldest first."""
        return [
            StepReport.model_validate(step.summary)
            for step in self._store.progress.steps()
            if step.state == "done"
        ]

    def checkpoints(self) -> list[tuple[int, int, str]]:
        """Step, version and `Learner.load` reference of every saved learner, oldest first."""
        return [
            (one.step, one.version, one.state_ref)
            for one in self._store.learner.all()
            if one.state_ref is not None
        ]

    def finished_episodes(self, groups: Sequence[GroupPlan]) -> list[PlayedEpisode]:
        """Episodes of these groups that finished, with their tokens."""
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

    def group_opened(self, group: GroupPlan) -> None:
        """A group was admitted."""
        progress = self.progress()
        self._store.progress.open_group(
            group.group_id,
            purpose=group.purpose,
            step=group.step,
            family=group.family,
            seed=group.seed,
            size=len(group.episodes),
            learner_version=progress.version if progress else None,
        )

    def episode_started(self, plan: EpisodePlan, version: int) -> None:
        """An episode begins; a second start keeps the first row."""
        self._store.episodes.start(
            plan.episode_id,
            group_id=plan.episode_id.rpartition("/")[0],
            idx=plan.member,
            family=plan.family,
            policy=self._policy,
            seed=plan.policy_seed,
            learner_version=version,
        )

    def episode_finished(self, episode: PlayedEpisode) -> None:
        """Result, reward, attempts and tokens in one transaction."""
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
            self._store.episodes.finish(
                episode_id,
                outcome=result.outcome_code,
                kind=result.reward_kind,
                reward=result.reward,
                terms={kind: terms.model_dump(mode="json") for kind, terms in result.terms.items()},
                summary=_summary(episode),
                trajectory=_tokens(result.trajectory),
            )

    def episode_died(self, episode: DeadEpisode) -> None:
        """Only an event: the row stays open for another try."""
        self._store.events.append(
            "episode.died", episode.plan.episode_id, {"reason": episode.reason}
        )

    def commit_step(
        self, progress: Progress, report: StepReport | None, groups: Sequence[FinishedGroup]
    ) -> None:
        """Step, learner version, groups and deaths in one transaction."""
        store = self._store
        with store.transaction():
            for group in groups:
                for dead in group.dead:
                    store.episodes.fail(dead.plan.episode_id, dead.reason)
                store.progress.mark_group(group.plan.group_id, "used", progress.step)
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
