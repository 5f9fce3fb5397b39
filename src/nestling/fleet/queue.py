"""Which job is next, who may finish it, and what happens when nobody does.

queued → running → done | failed. A claim gives a lease: a token that ends when its worker has been
silent for `lease_s` or has taken longer than the job's deadline. Only the token of the present lease
can finish a job; a late result is dropped and recorded. Leases run on the monotonic clock: a jump
of the wall clock expires nothing.

Every method is one durable change on return, or joins the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nestling.core.clock import Clock
from nestling.core.errors import FleetError
from nestling.store.jobs import JobRecord, JobState, LeaseRecord, NewJob
from nestling.store.run_store import RunStore

__all__ = ["CANCELLED", "Claim", "JobQueue"]

_LAST_ROUNDS = 3
"""With fewer jobs waiting per worker than this, all start soon in any order."""

CANCELLED = "cancelled"
"""Reason of a job that was dropped while it waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A job and the right to finish it."""

    job: JobRecord
    token: str
    tries: int
    """This try's number, from 1."""


class JobQueue:
    """The queue of one run, as one controller session sees it.

    `session` names this controller's life; `recover` frees what earlier ones held.
    """

    def __init__(
        self, store: RunStore, *, clock: Clock, session: str, lease_s: float = 60.0
    ) -> None:
        if lease_s <= 0:
            raise FleetError(f"lease_s={lease_s}; expected seconds above 0; set it to 60")
        self.store = store
        self.lease_s = lease_s
        self._clock = clock
        self._session = session
        self._draining = False
        self._waiting = 0
        self._claims_until_count = 0

    def enqueue(self, job: NewJob) -> JobRecord:
        """Queue a job, or join the queued, running or done job with the same reuse key.

        A failed job does not stand in the way: its id is given a number and the work is queued
        again.
        """
        jobs = self.store.jobs
        with self.store.joined():
            if job.reuse_key is not None:
                same = jobs.by_reuse_key(job.reuse_key)
                if same is not None:
                    return same
            job_id, number = job.id, 1
            while jobs.exists(job_id):
                number += 1
                job_id = f"{job.id}~{number}"
            jobs.insert(replace(job, id=job_id))
            return jobs.get(job_id)

    def claim(self, worker: str, *, lane: str = "cpu", num_workers: int = 0) -> Claim | None:
        """Take the next job of a lane; None when there is none or the queue drains.

        Groups share the workers evenly while much waits. With less than three rounds of jobs for
        `num_workers`, the longest goes first whatever its group: all start soon in any order, and
        this one ends soonest.
        """
        if self._draining:
            return None
        jobs = self.store.jobs
        with self.store.joined():
            job = jobs.next_queued(lane, fair=self._much_waits(lane, _LAST_ROUNDS * num_workers))
            if job is None:
                return None
            tries = job.tries + 1
            now, mono_s = self._clock.now(), self._clock.monotonic()
            # Every claim appends an event, so no two leases ever have the same token.
            token = f"{job.id}#{self.store.events.last_seq()}"
            jobs.start(
                job,
                LeaseRecord(
                    job_id=job.id,
                    token=token,
                    worker=worker,
                    session=self._session,
                    acquired_at=now,
                    heartbeat_at=now,
                    acquired_mono_s=mono_s,
                    expires_mono_s=mono_s + min(self.lease_s, job.deadline_s),
                    stage=None,
                ),
            )
            return Claim(job=job, token=token, tries=tries)

    def heartbeat(self, token: str, *, stage: str | None = None) -> bool:
        """Keep a lease, never beyond the job's deadline; False when the lease is over."""
        jobs = self.store.jobs
        with self.store.joined():
            lease = jobs.lease(token)
            if lease is None:
                return False
            deadline_s = lease.acquired_mono_s + jobs.get(lease.job_id).deadline_s
            end_s = min(self._clock.monotonic() + self.lease_s, deadline_s)
            return jobs.extend(token, end_s, stage)

    def keep(self, tokens: Sequence[str]) -> list[str]:
        """Heartbeats of many leases in one change; returns the tokens whose lease is over."""
        with self.store.joined():
            return self.store.jobs.keep(tokens, self._clock.monotonic() + self.lease_s)

    def complete(self, token: str, result: object) -> bool:
        """Finish a job; False when the lease was over, and then the result is dropped."""
        with self.store.joined():
            job = self._leased(token, "result")
            if job is None:
                return False
            self.store.jobs.finish(job, result)
            return True

    def fail(self, token: str, reason: str, detail: str, *, retry: bool) -> JobState | None:
        """End a try: queued again when `retry` and tries are left, else failed for good.

        Returns the new state; None when the lease was over.
        """
        with self.store.joined():
            job = self._leased(token, f"failure {reason}")
            if job is None:
                return None
            return self._end_try(job, reason, detail, retry=retry)

    def give_back(self, token: str) -> bool:
        """Queue a job again because its worker is stopped on purpose; no try is counted."""
        with self.store.joined():
            job = self._leased(token, "give back")
            if job is None:
                return False
            self.store.jobs.give_back(job)
            return True

    def expire(self) -> list[str]:
        """End every lease whose time is over; returns the ids of their jobs."""
        mono_s = self._clock.monotonic()
        ended: list[str] = []
        with self.store.joined():
            for lease in self.store.jobs.expired(mono_s):
                job = self.store.jobs.get(lease.job_id)
                if mono_s >= lease.acquired_mono_s + job.deadline_s:
                    detail = f"took longer than {job.deadline_s:g} s on {lease.worker}"
                    self._end_try(job, "timed_out", detail, retry=False)
                else:
                    detail = f"{lease.worker} was silent for {self.lease_s:g} s"
                    self._end_try(job, "lost", detail, retry=True)
                ended.append(job.id)
        return ended

    def recover(self) -> list[str]:
        """Free the jobs that earlier sessions held; call once, when this is the only controller.

        Being interrupted is not the job's fault, but a job that kills its controller each time must
        end too, so it counts as a try.
        """
        freed: list[str] = []
        with self.store.joined():
            for lease in self.store.jobs.leases():
                if lease.session != self._session:
                    job = self.store.jobs.get(lease.job_id)
                    self._end_try(job, "lost", f"controller {lease.session} ended", retry=True)
                    freed.append(job.id)
        return freed

    def forgive(self, stalled_s: float) -> None:
        """Give every lease of this session the time that the controller itself stood still.

        A suspended laptop or a long computation in the controller is not a silent worker.
        """
        with self.store.joined():
            self.store.jobs.shift_leases(self._session, stalled_s)

    def cancel(self, job_id: str) -> bool:
        """Drop a job that still waits; False when it runs or is over."""
        with self.store.joined():
            job = self.store.jobs.get(job_id)
            if job.state != "queued":
                return False
            self.store.jobs.give_up(job, CANCELLED, "nobody waits for it any more")
            return True

    def drain(self) -> None:
        """Give out no more jobs; those that run may finish, those that wait stay queued."""
        self._draining = True

    def _much_waits(self, lane: str, limit: int) -> bool:
        """Whether more than `limit` jobs wait; counted anew only when that can have changed.

        A claim takes one job at most, so above the limit a count holds for a while; below it, new
        jobs may be missed for an eighth of the claims that are left.
        """
        if limit == 0:
            return True
        if self._claims_until_count <= 0:
            self._waiting = self.store.jobs.waiting(lane)
            self._claims_until_count = (
                self._waiting - limit if self._waiting > limit else self._waiting // 8
            )
        self._claims_until_count -= 1
        return self._waiting > limit

    def _leased(self, token: str, what: str) -> JobRecord | None:
        lease = self.store.jobs.lease(token)
        if lease is None:
            self.store.jobs.note_stale(token, token.rpartition("#")[0], what)
            return None
        return self.store.jobs.get(lease.job_id)

    def _end_try(self, job: JobRecord, reason: str, detail: str, *, retry: bool) -> JobState:
        if retry and job.tries < job.max_tries:
            self.store.jobs.requeue(job, reason)
            return "queued"
        if retry:
            detail = f"{detail}; gave up after {job.tries} tries"
        self.store.jobs.give_up(job, reason, detail)
        return "failed"
