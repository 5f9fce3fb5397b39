"""Work items and their leases: the rows behind the queue.

Each method is one state change with its event and joins the caller's transaction. Rules that need
a clock, a cap or a token (who may claim, when a lease is over) live in `fleet.queue`.

`shares` counts queued and running jobs per lane, priority and group, so that a claim finds the
group with the fewest running jobs through an index, however many jobs wait.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from sqlite3 import Row
from typing import Any, Literal

from nestling.core.clock import Clock
from nestling.core.errors import StoreError
from nestling.store.connection import Connection
from nestling.store.events import EventLog

__all__ = ["JobRecord", "JobSpan", "JobState", "JobTable", "LeaseRecord", "NewJob"]

JobState = Literal["queued", "running", "done", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A work item to be queued."""

    id: str
    kind: str
    """Which handler does it: check, run or baseline."""
    payload: Mapping[str, Any]
    """JSON for the handler."""
    group_key: str = ""
    """Whose work it is; groups share the workers evenly."""
    priority: int = 0
    """Higher goes first, whatever the group."""
    lane: str = "cpu"
    """Which kind of worker may take it."""
    episode_id: str | None = None
    """Whose money it spends."""
    family: str | None = None
    reuse_key: str | None = None
    """Jobs with the same key are the same work: at most one of them is not failed."""
    max_tries: int = 3
    deadline_s: float = 3600.0
    """Longest time one try may take."""
    predicted_s: float = 0.0
    """Expected time of one try; within a group the longest goes first. 0: unknown, goes last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A work item as it stands."""

    seq: int
    id: str
    kind: str
    state: JobState
    lane: str
    group_key: str
    priority: int
    episode_id: str | None
    family: str | None
    reuse_key: str | None
    payload: dict[str, Any]
    result: Any | None
    """JSON from the handler; only when done."""
    reason: str | None
    """Stable code; only when failed."""
    detail: str | None
    tries: int
    max_tries: int
    deadline_s: float
    predicted_s: float
    queued_at: float
    started_at: float | None
    finished_at: float | None
    worker: str | None
    """Who has it or had it last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpan:
    """When and where a work item ran, without what it was about."""

    id: str
    kind: str
    state: JobState
    lane: str
    family: str | None
    episode_id: str | None
    worker: str | None
    tries: int
    queued_at: float
    started_at: float | None
    """Of its last try."""
    finished_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """The right of one worker to finish one job."""

    job_id: str
    token: str
    worker: str
    session: str
    """The controller that gave it."""
    acquired_at: float
    heartbeat_at: float
    acquired_mono_s: float
    expires_mono_s: float
    stage: str | None
    """What the worker said it is doing."""


class JobTable:
    """Jobs, leases and shares."""

    def __init__(self, connection: Connection, events: EventLog, clock: Clock) -> None:
        self._connection = connection
        self._events = events
        self._clock = clock

    def get(self, job_id: str) -> JobRecord:
        """One job; `StoreError` when there is none."""
        row = self._connection.one("SELECT * FROM jobs WHERE id = ?", (job_id,))
        if row is None:
            raise StoreError(f"no job {job_id!r} in {self._connection.path}; expected a queued id")
        return _job(row)

    def exists(self, job_id: str) -> bool:
        """Whether there is a job with this id."""
        return self._connection.one("SELECT 1 FROM jobs WHERE id = ?", (job_id,)) is not None

    def by_reuse_key(self, reuse_key: str) -> JobRecord | None:
        """The queued, running or done job with this key."""
        row = self._connection.one(
            "SELECT * FROM jobs WHERE reuse_key = ? AND state <> 'failed'", (reuse_key,)
        )
        return None if row is None else _job(row)

    def all(self, state: JobState | None = None, kind: str | None = None) -> list[JobRecord]:
        """Jobs in the order they were queued."""
        rows = self._connection.all(
            "SELECT * FROM jobs WHERE (?1 IS NULL OR state = ?1) AND (?2 IS NULL OR kind = ?2) "
            "ORDER BY seq",
            (state, kind),
        )
        return [_job(row) for row in rows]

    def spans(self) -> list[JobSpan]:
        """Every job in queue order, without payloads and results: cheap."""
        rows = self._connection.all(
            "SELECT id, kind, state, lane, family, episode_id, worker, tries, queued_at, "
            "started_at, finished_at FROM jobs ORDER BY seq"
        )
        return [JobSpan(**dict(row)) for row in rows]

    def with_payload(self, key: str, value: str) -> JobRecord | None:
        """The oldest job whose payload holds `value` under `key`; reads every payload."""
        row = self._connection.one(
            "SELECT * FROM jobs WHERE json_extract(payload, '$.' || ?) = ? ORDER BY seq LIMIT 1",
            (key, value),
        )
        return None if row is None else _job(row)

    def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state."""
        counts: dict[JobState, int] = {"queued": 0, "running": 0, "done": 0, "failed": 0}
        for row in self._connection.all("SELECT state, count(*) FROM jobs GROUP BY state"):
            counts[row[0]] = row[1]
        return counts

    def waiting(self, lane: str | None = None) -> int:
        """How many jobs wait for a worker; cheap."""
        row = self._connection.one(
            "SELECT ifnull(sum(queued), 0) FROM shares WHERE queued > 0 AND (?1 IS NULL OR lane = ?1)",
            (lane,),
        )
        assert row is not None
        return int(row[0])

    def insert(self, job: NewJob) -> None:
        """Queue a job; its id and live reuse key must be new."""
        payload = json.dumps(job.payload, separators=(",", ":"), allow_nan=False)
        with self._connection.joined():
            self._connection.execute(
                "INSERT INTO jobs (id, kind, state, lane, group_key, priority, episode_id, family, "
                "reuse_key, payload, max_tries, deadline_s, predicted_s, queued_at) "
                "VALUES (?, ?, 'queued', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    job.id,
                    job.kind,
                    job.lane,
                    job.group_key,
                    job.priority,
                    job.episode_id,
                    job.family,
                    job.reuse_key,
                    payload,
                    job.max_tries,
                    job.deadline_s,
                    job.predicted_s,
                    self._clock.now(),
                ),
            )
            self._connection.execute(
                "INSERT INTO shares (lane, priority, group_key, queued) VALUES (?, ?, ?, 1) "
                "ON CONFLICT DO UPDATE SET queued = queued + 1",
                (job.lane, job.priority, job.group_key),
            )
            self._events.append("job.queued", job.id, {"kind": job.kind, "group": job.group_key})

    def next_queued(self, lane: str, *, fair: bool = True) -> JobRecord | None:
        """The job whose turn it is; None when no job waits.

        Highest priority, then the group with the fewest running jobs, then the group served
        longest ago; within it the job that is predicted to take longest, then the oldest.
        Longest first leaves the short ones to fill the workers' last gaps. Not `fair`: highest
        priority, then longest, whatever the group.
        """
        share = self._connection.one(
            "SELECT priority, group_key FROM shares WHERE lane = ? AND queued > 0 "
            "ORDER BY priority DESC, running, served, group_key LIMIT 1",
            (lane,),
        )
        if share is None:
            return None
        if fair:
            row = self._connection.one(
                "SELECT * FROM jobs WHERE state = 'queued' AND lane = ? AND priority = ? "
                "AND group_key = ? ORDER BY predicted_s DESC, seq LIMIT 1",
                (lane, share["priority"], share["group_key"]),
            )
        else:
            row = self._connection.one(
                "SELECT * FROM jobs INDEXED BY jobs_longest WHERE state = 'queued' AND lane = ? "
                "AND priority = ? ORDER BY predicted_s DESC, seq LIMIT 1",
                (lane, share["priority"]),
            )
        if row is None:
            raise StoreError(
                f"{self._connection.path}: group {share['group_key']!r} counts queued jobs that "
                f"are not there; the file was changed by hand or is damaged; restore a backup"
            )
        return _job(row)

    def start(self, job: JobRecord, lease: LeaseRecord) -> None:
        """Move a queued job to running under a lease; counts as a try."""
        with self._connection.joined():
            self._connection.execute(
                "UPDATE jobs SET state = 'running', tries = tries + 1, worker = ?, started_at = ? "
                "WHERE id = ?",
                (lease.worker, lease.acquired_at, job.id),
            )
            self._connection.execute(
                "INSERT INTO leases (job_id, token, worker, session, acquired_at, heartbeat_at, "
                "acquired_mono_s, expires_mono_s, stage) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    lease.job_id,
                    lease.token,
                    lease.worker,
                    lease.session,
                    lease.acquired_at,
                    lease.heartbeat_at,
                    lease.acquired_mono_s,
                    lease.expires_mono_s,
                    lease.stage,
                ),
            )
            seq = self._events.append(
                "job.started", job.id, {"worker": lease.worker, "try": job.tries + 1}
            )
            self._share(job, "queued = queued - 1, running = running + 1, served = ?", seq)

    def lease(self, token: str) -> LeaseRecord | None:
        """The lease of a token; None when it is over."""
        row = self._connection.one("SELECT * FROM leases WHERE token = ?", (token,))
        return None if row is None else LeaseRecord(**dict(row))

    def leases(self) -> list[LeaseRecord]:
        """Every lease that is not over."""
        return [
            LeaseRecord(**dict(row))
            for row in self._connection.all("SELECT * FROM leases ORDER BY job_id")
        ]

    def expired(self, mono_s: float) -> list[LeaseRecord]:
        """Leases that ended before a moment of the monotonic clock."""
        return [
            LeaseRecord(**dict(row))
            for row in self._connection.all(
                "SELECT * FROM leases WHERE expires_mono_s < ? ORDER BY expires_mono_s", (mono_s,)
            )
        ]

    def extend(self, token: str, expires_mono_s: float, stage: str | None) -> bool:
        """Move a lease's end; False when it is over already. No event: it changes no state."""
        cursor = self._connection.execute(
            "UPDATE leases SET heartbeat_at = ?, expires_mono_s = ?, stage = ifnull(?, stage) "
            "WHERE token = ?",
            (self._clock.now(), expires_mono_s, stage, token),
        )
        return cursor.rowcount == 1

    def keep(self, tokens: Sequence[str], expires_mono_s: float) -> list[str]:
        """Move the end of many leases, none beyond its job's deadline; returns those long over."""
        at = self._clock.now()
        over: list[str] = []
        for token in tokens:
            cursor = self._connection.execute(
                "UPDATE leases SET heartbeat_at = ?1, expires_mono_s = min(?2, acquired_mono_s + "
                "(SELECT deadline_s FROM jobs WHERE jobs.id = leases.job_id)) WHERE token = ?3",
                (at, expires_mono_s, token),
            )
            if cursor.rowcount == 0:
                over.append(token)
        return over

    def shift_leases(self, session: str, seconds: float) -> None:
        """Move the end, and the deadline with it, of every lease of a session."""
        self._connection.execute(
            "UPDATE leases SET expires_mono_s = expires_mono_s + ?1, "
            "acquired_mono_s = acquired_mono_s + ?1 WHERE session = ?2",
            (seconds, session),
        )

    def finish(self, job: JobRecord, result: object) -> None:
        """Move a running job to done."""
        text = json.dumps(result, separators=(",", ":"), allow_nan=False)
        self._end(job, "done", result=text, reason=None, detail=None)

    def give_up(self, job: JobRecord, reason: str, detail: str) -> None:
        """Move a queued or running job to failed, for good."""
        self._end(job, "failed", result=None, reason=reason, detail=detail)

    def requeue(self, job: JobRecord, reason: str) -> None:
        """Move a running job back to queued; it keeps its place in its group."""
        with self._connection.joined():
            self._connection.execute("DELETE FROM leases WHERE job_id = ?", (job.id,))
            self._connection.execute("UPDATE jobs SET state = 'queued' WHERE id = ?", (job.id,))
            self._share(job, "queued = queued + 1, running = running - 1")
            self._events.append("job.requeued", job.id, {"reason": reason, "tries": job.tries})

    def give_back(self, job: JobRecord) -> None:
        """Move a running job back to queued as if this try had not been: we stopped it ourselves."""
        with self._connection.joined():
            self._connection.execute("UPDATE jobs SET tries = tries - 1 WHERE id = ?", (job.id,))
            self.requeue(job, "interrupted")

    def note_stale(self, token: str, job_id: str, what: str) -> None:
        """Record that a late message of a former lease was dropped."""
        self._events.append("job.stale_dropped", job_id, {"token": token[:8], "what": what})

    def _end(
        self,
        job: JobRecord,
        state: Literal["done", "failed"],
        *,
        result: str | None,
        reason: str | None,
        detail: str | None,
    ) -> None:
        with self._connection.joined():
            self._connection.execute("DELETE FROM leases WHERE job_id = ?", (job.id,))
            self._connection.execute(
                "UPDATE jobs SET state = ?, result = ?, reason = ?, detail = ?, finished_at = ? "
                "WHERE id = ?",
                (state, result, reason, detail, self._clock.now(), job.id),
            )
            column = "running" if job.state == "running" else "queued"
            self._share(job, f"{column} = {column} - 1")
            data = {} if reason is None else {"reason": reason, "detail": detail}
            self._events.append(f"job.{state}", job.id, data)

    def _share(self, job: JobRecord, change: str, *values: int) -> None:
        self._connection.execute(
            f"UPDATE shares SET {change} WHERE lane = ? AND priority = ? AND group_key = ?",  # noqa: S608 (own constants)
            (*values, job.lane, job.priority, job.group_key),
        )


def _job(row: Row) -> JobRecord:
    fields = dict(row)
    fields["payload"] = json.loads(fields["payload"])
    fields["result"] = None if fields["result"] is None else json.loads(fields["result"])
    return JobRecord(**fields)
