"""The machine room as an episode sees it: check, run, baselines; queue, wait, answer.

The same work is done once a run: a job with the same content, family and settings that waits, runs
or is finished is joined, so that a resumed episode gets the outcome it had.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from nestling.core.errors import FleetError, JobRejectedError, Problem, StoreError
from nestling.core.rundir import ArtifactStore
from nestling.fleet.budget import GRACE_S, Budget
from nestling.fleet.finish import finish
from nestling.fleet.handlers import StageSeconds, pack_bundle
from nestling.fleet.predict import JobShape, Predictor
from nestling.fleet.queue import CANCELLED, JobQueue
from nestling.fleet.watch import JobWatch
from nestling.jobs.bounds import SMALL, Bounds
from nestling.jobs.bundle import Bundle
from nestling.jobs.outcome import Outcome, OutcomeStatus
from nestling.jobs.probe_report import ProbeReport
from nestling.store import GroupCommit
from nestling.store.jobs import JobRecord, NewJob

__all__ = ["FleetRunner", "RunnerSettings"]

Kind = Literal["check", "run", "baseline"]

_PRIORITY: Mapping[Kind, int] = {"baseline": 2, "check": 1, "run": 0}
"""Short work first: an episode waits for a check, and everyone waits for baselines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """What jobs of this run have in common."""

    identity: Mapping[str, Any]
    """Everything beside bundle and family that changes a result: trainer, seeds, bases. JSON."""
    deadlines: StageSeconds = field(default_factory=StageSeconds)
    bounds: Bounds = SMALL
    """Which settings a job may use."""
    max_tries: int = 3
    lane: str = "cpu"
    machine: str = "cpu-core"
    """Price of the lane's workers."""


class FleetRunner:
    """Satisfies what an episode needs of a job runner.

    `for_episode` gives a runner whose jobs count for one episode and share workers by group.
    """

    def __init__(
        self,
        *,
        queue: JobQueue,
        writer: GroupCommit,
        watch: JobWatch,
        artifacts: ArtifactStore,
        settings: RunnerSettings,
        budget: Budget | None = None,
        predictor: Predictor | None = None,
        episode_id: str | None = None,
        group_key: str = "",
    ) -> None:
        self._queue = queue
        self._writer = writer
        self._watch = watch
        self._artifacts = artifacts
        self._settings = settings
        self._budget = budget
        self._predictor = predictor
        self._episode_id = episode_id
        self._group_key = group_key

    def for_episode(self, episode_id: str, group_key: str) -> FleetRunner:
        """The same machine room for one episode."""
        return FleetRunner(
            queue=self._queue,
            writer=self._writer,
            watch=self._watch,
            artifacts=self._artifacts,
            settings=self._settings,
            budget=self._budget,
            predictor=self._predictor,
            episode_id=episode_id,
            group_key=group_key,
        )

    async def check(self, bundle: Bundle, family: str) -> ProbeReport:
        """Run the probe; never raises for anything the agent wrote.

        A job that no cap has room for is refused here, unless it was submitted before: its run is
        joined, so nothing new is spent, and a resumed episode gets the answer it had.
        """
        record = await self._do("check", bundle, family)
        if record.state == "failed":
            return ProbeReport(ok=False, problems=(_check_problem(record),))
        report = ProbeReport.model_validate(record.result)
        refusal = await self._refusal(bundle, family) if report.ok else None
        if refusal is not None:
            return report.model_copy(update={"ok": False, "problems": (_budget(refusal),)})
        return report

    async def run(self, bundle: Bundle, family: str) -> Outcome:
        """Train and score a job that passed the probe; failure is an outcome, not an exception."""
        shape = await self._shape(bundle, family)
        record = await self._do("run", bundle, family, await self._predicted_s(shape))
        if record.state == "failed":
            return _failed_outcome(record, bundle, family, self._settings.bounds)
        outcome = Outcome.model_validate(record.result)
        if shape is not None and outcome.status == "succeeded":
            await self._remember(record, shape)
        return outcome

    async def baselines(self, family: str) -> dict[str, float]:
        """Untrained score of every base model on hidden set A."""
        record = await self._do("baseline", None, family)
        if record.state == "failed":
            raise FleetError(
                f"the baselines of {family} could not be computed: {record.reason}: "
                f"{record.detail}; see the worker logs of the run"
            )
        return {str(name): float(score) for name, score in dict(record.result or {}).items()}

    async def _shape(self, bundle: Bundle, family: str) -> JobShape | None:
        """What is known of a job before it runs; None for one that cannot be read."""
        try:
            manifest = bundle.manifest(self._settings.bounds)
        except JobRejectedError:
            return None
        key = _reuse_key("check", _payload(bundle, family), self._settings.identity)
        probed = await self._writer.run(lambda: self._queue.store.jobs.by_reuse_key(key))
        bound_s = None
        if probed is not None and probed.state == "done":
            bound_s = ProbeReport.model_validate(probed.result).predicted_cpu_s
        work = manifest.prime_rl
        return JobShape(
            family=family,
            base=manifest.base_model,
            turns=float(work.max_steps * work.batch_size * work.max_turns),
            bound_s=bound_s,
        )

    async def _predicted_s(self, shape: JobShape | None) -> float:
        """Expected seconds; 0 when nothing is known."""
        if shape is None:
            return 0.0
        if self._predictor is None:
            return max(0.0, shape.bound_s or 0.0)
        predictor = self._predictor
        return (await self._writer.run(lambda: predictor.predict(shape))).seconds

    async def _remember(self, record: JobRecord, shape: JobShape) -> None:
        """Tell the predictor how long a job really took; its last try, as the others died."""
        predictor = self._predictor
        if predictor is None or record.started_at is None or record.finished_at is None:
            return
        run, seconds = str(self._queue.store.path.resolve()), record.finished_at - record.started_at
        await self._writer.run(lambda: predictor.remember(run, record.id, shape, seconds))

    async def _do(
        self, kind: Kind, bundle: Bundle | None, family: str, predicted_s: float = 0.0
    ) -> JobRecord:
        payload = _payload(bundle, family)
        if bundle is not None:
            payload["bundle"] = await asyncio.to_thread(pack_bundle, self._artifacts, bundle)
        settings = self._settings
        key = _reuse_key(kind, payload, settings.identity)
        return await self._wait(
            NewJob(
                id=f"{kind}-{key[:16]}",
                kind=kind,
                payload=payload,
                group_key=self._group_key,
                priority=_PRIORITY[kind],
                lane=settings.lane,
                # A baseline is everybody's, so no episode pays for it.
                episode_id=None if kind == "baseline" else self._episode_id,
                family=family,
                reuse_key=key,
                max_tries=settings.max_tries,
                deadline_s=getattr(settings.deadlines, kind),
                predicted_s=predicted_s,
            )
        )

    async def _wait(self, job: NewJob) -> JobRecord:
        """Queue or join a job and wait for its end.

        A job that another caller dropped in the moment in which it was joined is queued again.
        """
        while True:
            record = await self._queue_and_wait(job)
            if record.reason != CANCELLED:
                return record

    async def _queue_and_wait(self, job: NewJob) -> JobRecord:
        """When the last caller that waits is cancelled, a job that still waits is dropped."""
        queued: list[str] = []
        over: asyncio.Future[None] | None = None

        def enqueue() -> str:
            queued[:] = [self._queue.enqueue(job).id]
            return queued[0]

        try:
            job_id = await finish(self._writer.run(enqueue))
            over = self._watch.expect(job_id)
            record = await self._writer.run(lambda: self._queue.store.jobs.get(job_id))
            if record.state in ("queued", "running"):
                await over
                record = await self._writer.run(lambda: self._queue.store.jobs.get(job_id))
        except asyncio.CancelledError:
            for one in queued:
                if self._watch.forget(one, over):
                    with suppress(StoreError):  # closing down; the job waits for a resumed run
                        await finish(self._writer.run(partial(self._queue.cancel, one)))
            raise
        self._watch.forget(job_id, over)
        return record

    async def _refusal(self, bundle: Bundle, family: str) -> str | None:
        budget, settings = self._budget, self._settings
        if budget is None:
            return None
        key = _reuse_key("run", _payload(bundle, family), settings.identity)

        def ask() -> str | None:
            if self._queue.store.jobs.by_reuse_key(key) is not None:
                return None
            return budget.refusal(
                machine=settings.machine,
                seconds=settings.deadlines.run + GRACE_S,
                episode_id=self._episode_id,
            )

        return await self._writer.run(ask)


def _payload(bundle: Bundle | None, family: str) -> dict[str, Any]:
    return {"family": family} | ({} if bundle is None else {"job_hash": bundle.job_hash})


def _reuse_key(kind: Kind, payload: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    content = {key: value for key, value in payload.items() if key != "bundle"}
    text = json.dumps([kind, content, identity], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_problem(record: JobRecord) -> Problem:
    if record.reason == "budget.refused":
        return _budget(record.detail or "")
    return Problem(
        stage="load",
        code=f"probe.{record.reason}",
        wrong=f"the probe did not survive the job: {(record.detail or '')[:300]}",
        expected="an environment that loads and answers within its limits",
        fix="remove whatever ends the process, hangs or takes much memory at import or in a tool",
    )


def _budget(text: str) -> Problem:
    return Problem(
        stage="budget",
        code="budget.refused",
        wrong=text,
        expected="a cost within the caps",
        fix="stop here, or ask for a larger budget",
    )


def _failed_outcome(record: JobRecord, bundle: Bundle, family: str, bounds: Bounds) -> Outcome:
    try:
        base_model = bundle.manifest(bounds).base_model
    except JobRejectedError:
        base_model = ""
    statuses: dict[str, OutcomeStatus] = {"lost": "lost", "timed_out": "timed_out"}
    reason = record.reason or "unknown"
    return Outcome(
        job_hash=bundle.job_hash,
        family=family,
        base_model=base_model,
        status=statuses.get(reason, "failed"),
        reason=f"fleet.{reason}" if reason in statuses else reason,
        detail=record.detail or "",
    )
