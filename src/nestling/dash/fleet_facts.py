"""Workers, queue and utilisation, from the rows of the queue."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nestling.store import RunStore
from nestling.store.jobs import JobSpan, LeaseRecord

__all__ = ["FleetFacts", "QueueRow", "WorkerRow", "fleet_facts"]

WINDOW_S = 600.0
"""The timeline and the recent utilisation look back this far from the newest sign of life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """One worker, alive or gone."""

    name: str
    is_alive: bool
    pid: int | None
    launched_at: float | None
    job_id: str | None
    """What it works on, and the next two."""
    kind: str | None
    episode_id: str | None
    stage: str | None
    since: float | None
    heartbeat_at: float | None
    num_done: int
    busy_s: float
    """In finished jobs (last try each) and the present one."""
    busy_share: float | None
    """Of the window; None without a span in it."""
    spans: tuple[JobSpan, ...]
    """Those that touch the window, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """Jobs of one kind by state."""

    kind: str
    queued: int
    running: int
    done: int
    failed: int
    retried: int
    """Done or failed after more than one try."""
    mean_wait_s: float | None
    """From queued to the start of the last try."""
    mean_run_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    """The machine room."""

    workers: tuple[WorkerRow, ...]
    queue: tuple[QueueRow, ...]
    window: tuple[float, float]
    """Seconds since the epoch."""
    refused: int
    """Reservations that a cap refused."""

    @property
    def num_alive(self) -> int:
        """Workers on record."""
        return sum(one.is_alive for one in self.workers)

    @property
    def num_busy(self) -> int:
        """Workers with a job."""
        return sum(one.job_id is not None for one in self.workers)

    @property
    def num_queued(self) -> int:
        """Jobs that wait."""
        return sum(one.queued for one in self.queue)

    @property
    def utilisation(self) -> float | None:
        """Mean busy share of the workers that did something in the window."""
        shares = [one.busy_share for one in self.workers if one.busy_share is not None]
        return sum(shares) / len(shares) if shares else None


def fleet_facts(store: RunStore, now: float) -> FleetFacts:
    """The machine room as of `now`; a run that is over is seen as of its last job."""
    spans, leases = store.jobs.spans(), store.jobs.leases()
    processes = {one.name: one for one in store.processes.all()}
    is_going_on = bool(leases)
    ends = [one.finished_at for one in spans if one.finished_at is not None]
    end = now if is_going_on else max(ends, default=now)
    starts = [one.started_at for one in spans if one.started_at is not None]
    window = (max(end - WINDOW_S, min(starts, default=end - WINDOW_S)), end)
    by_worker: dict[str, list[JobSpan]] = defaultdict(list)
    for span in spans:
        if span.worker is not None and span.started_at is not None:
            by_worker[span.worker].append(span)
    held = {one.worker: one for one in leases}
    names = sorted({*processes, *held, *by_worker}, key=lambda name: (name not in processes, name))
    workers = []
    for name in names:
        process = processes.get(name)
        workers.append(
            _worker(
                name,
                by_worker[name],
                held.get(name),
                launched=(process.pid, process.launched_at) if process else None,
                window=window,
            )
        )
    return FleetFacts(
        workers=tuple(workers),
        queue=tuple(_queue(kind, found) for kind, found in _by_kind(spans).items()),
        window=window,
        refused=store.events.count("money.refused"),
    )


def _worker(
    name: str,
    spans: Sequence[JobSpan],
    lease: LeaseRecord | None,
    *,
    launched: tuple[int, float] | None,
    window: tuple[float, float],
) -> WorkerRow:
    start, end = window
    job = next((one for one in spans if lease and one.id == lease.job_id), None)
    lengths = [_overlap(one, (0.0, end)) for one in spans]
    recent = sorted(
        (one for one in spans if _overlap(one, window) > 0), key=lambda one: one.started_at or 0.0
    )
    busy_s = sum(_overlap(one, window) for one in recent)
    # A worker that was started within the window is measured from its start.
    since = max(start, launched[1]) if launched else start
    length = end - since
    return WorkerRow(
        name=name,
        is_alive=launched is not None or lease is not None,
        pid=launched[0] if launched else None,
        launched_at=launched[1] if launched else None,
        job_id=lease.job_id if lease else None,
        kind=job.kind if job else None,
        episode_id=job.episode_id if job else None,
        stage=lease.stage if lease else None,
        since=lease.acquired_at if lease else None,
        heartbeat_at=lease.heartbeat_at if lease else None,
        num_done=sum(one.state == "done" for one in spans),
        busy_s=sum(lengths),
        busy_share=min(1.0, busy_s / length) if recent and length > 0 else None,
        spans=tuple(recent),
    )


def _overlap(span: JobSpan, window: tuple[float, float]) -> float:
    """Seconds of the span inside the window; a queued job that was given back counts nothing."""
    if span.started_at is None or span.state == "queued":
        return 0.0
    end = span.finished_at if span.finished_at is not None else window[1]
    return max(0.0, min(end, window[1]) - max(span.started_at, window[0]))


def _by_kind(spans: Iterable[JobSpan]) -> Mapping[str, list[JobSpan]]:
    found: dict[str, list[JobSpan]] = defaultdict(list)
    for span in spans:
        found[span.kind].append(span)
    return dict(sorted(found.items()))


def _queue(kind: str, spans: Sequence[JobSpan]) -> QueueRow:
    states = Counter(one.state for one in spans)
    waits = [one.started_at - one.queued_at for one in spans if one.started_at is not None]
    runs = [
        one.finished_at - one.started_at
        for one in spans
        if one.finished_at is not None and one.started_at is not None
    ]
    return QueueRow(
        kind=kind,
        queued=states["queued"],
        running=states["running"],
        done=states["done"],
        failed=states["failed"],
        retried=sum(one.tries > 1 and one.finished_at is not None for one in spans),
        mean_wait_s=sum(waits) / len(waits) if waits else None,
        mean_run_s=sum(runs) / len(runs) if runs else None,
    )
