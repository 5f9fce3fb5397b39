"""The real queue, pool, budget and store against simulated workers in virtual time.

Answers two questions without a cluster: how busy a pool keeps its workers compared with the best
schedule there can be, and what one controller costs per job event. Only the workers are simulated
(`simulate_workers`) and only waiting is skipped (`simulate_loop`): every claim, lease, heartbeat,
result and payment is a durable transaction in a real file.
"""

from __future__ import annotations

import asyncio
import math
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from nestling.core.errors import ConfigError
from nestling.core.seeds import stream
from nestling.fleet.budget import Budget, Caps, load_prices
from nestling.fleet.pool import Pool, PoolLimits
from nestling.fleet.queue import JobQueue
from nestling.fleet.simulate_loop import VirtualClock, VirtualTimeLoop
from nestling.fleet.simulate_schedule import best_found_s, list_schedule_s, lower_bound_s
from nestling.fleet.simulate_workers import Hazards, SimulatedProvider
from nestling.store import GroupCommit, RunStore
from nestling.store.events import Event
from nestling.store.jobs import NewJob

__all__ = ["Simulation", "SimulationReport", "simulate"]

T = TypeVar("T")

_ENQUEUE_AT_ONCE = 500
_CHANGES_AT_ONCE = 512
_MOST_SEARCHED = 200
_PROGRESS_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What is simulated."""

    num_jobs: int
    num_workers: int
    mean_s: float = 240.0
    """Mean length of a job."""
    sigma: float = 0.6
    """Spread of the logarithm of the length; 0.6: the longest 5 % take over 2.2 times the mean."""
    prediction_sigma: float | None = 0.2
    """Error of the logarithm of the predicted length; None: no predictions."""
    num_groups: int = 1
    """Groups that share the workers evenly."""
    max_tries: int = 20
    lease_s: float = 60.0
    hazards: Hazards = field(default_factory=Hazards)
    seed: int = 0
    writer_thread: bool = False
    """Commit in a thread of its own, as a real controller does: slower, not quite reproducible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """What came of it. Times are virtual, CPU and memory are this process's own."""

    jobs: int
    workers: int
    efficiency: float
    """Lower bound over makespan: at most 1, and 1 only when no schedule is better."""
    makespan_s: float
    """From the first job queued to the last one over."""
    lower_bound_s: float
    """No schedule of the finished tries ends sooner, even if nothing dies."""
    best_found_s: float | None
    """The best schedule found for the same jobs, lengths known, nothing dies; the best possible one
    is not shorter than `lower_bound_s` nor longer than this. None for too many jobs to search."""
    longest_first_s: float
    """The same jobs, longest first, lengths known exactly, nothing dies."""
    lost: int
    """Jobs that are neither done nor given up; anything but 0 is a defect."""
    duplicated: int
    """Results counted beyond the first of a job; anything but 0 is a defect."""
    gave_up: int
    """Jobs that failed in the end, for example after `max_tries` deaths."""
    deaths: int
    retries: int
    job_events: int
    """Jobs queued, started, requeued, done and failed, as recorded in the store."""
    controller_cpu_ms_per_event: float
    """CPU time of the whole process over `job_events`; simulating the workers is in it."""
    cpu_s: float
    wall_s: float
    peak_rss_mib: float
    rss_mib_at_done_share: dict[str, float]
    """Resident memory when so much of the jobs was over."""
    start_rss_mib: float
    database_mib: float

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def simulate(simulation: Simulation, folder: Path | None = None) -> SimulationReport:
    """Run it; the store is made in `folder` (default: a temporary one) as `run.db`.

    Raises `ConfigError` for numbers out of range.
    """
    _require(simulation)
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="nestling-simulate-") as made:
            return simulate(simulation, Path(made))
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(_Run(simulation, folder).run())


class _HoldingWriter(GroupCommit):
    """A writer whose thread works in no virtual time."""

    async def run(self, change: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        with loop.holding():
            return await super().run(change)


class _InlineWriter(GroupCommit):
    """Commits in the event loop's own thread whatever was handed in since it last looked.

    The same transactions without the way to another thread and back: reproducible, and quick on a
    machine whose cores are busy with something else.
    """

    def __init__(self, store: RunStore) -> None:
        super().__init__(store)
        self._pending: list[tuple[Callable[[], Any], Future[Any]]] = []

    async def run(self, change: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        done: Future[T] = Future()
        over: asyncio.Future[None] = loop.create_future()
        done.add_done_callback(lambda _: over.set_result(None))
        if not self._pending:
            loop.call_soon(self._flush)
        self._pending.append((change, done))
        await asyncio.shield(over)
        return done.result()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        for first in range(0, len(pending), _CHANGES_AT_ONCE):
            self.commit_batch(pending[first : first + _CHANGES_AT_ONCE])


class _Run:
    """One simulation."""

    def __init__(self, simulation: Simulation, folder: Path) -> None:
        self._simulation = simulation
        self._folder = folder
        self._lengths_s = _lengths(simulation)
        self._provider = SimulatedProvider(simulation.hazards, simulation.num_jobs)
        self._counts: dict[str, int] = {}
        self._memory: dict[str, float] = {}
        self._over = asyncio.Event()
        self._end_s = 0.0

    async def run(self) -> SimulationReport:
        """Play it to its end."""
        loop = asyncio.get_running_loop()
        clock = VirtualClock(loop)
        start_rss_mib = _rss_mib()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        with RunStore(self._folder / "run.db", clock=clock) as store:
            writer = (_HoldingWriter if self._simulation.writer_thread else _InlineWriter)(store)
            try:
                store.events.subscribe(self._listener(loop))
                began_s = await self._serve(writer, clock)
            finally:
                writer.close()
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
            return self._report(store, began_s, wall_s, cpu_s, start_rss_mib)

    async def _serve(self, writer: GroupCommit, clock: VirtualClock) -> float:
        simulation = self._simulation
        queue = JobQueue(writer.store, clock=clock, session="one", lease_s=simulation.lease_s)
        pool = Pool(
            queue=queue,
            writer=writer,
            provider=self._provider,
            size=simulation.num_workers,
            clock=clock,
            budget=Budget(writer.store, clock=clock, caps=Caps(), prices=load_prices()),
            limits=PoolLimits(),
        )
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(pool.run())
            await asyncio.sleep(1.0)  # the first launch is over
            began_s = clock.monotonic()
            await self._enqueue(queue, writer)
            await self._over.wait()
            pool.stop()
            await serving
        await self._provider.close()
        return began_s

    async def _enqueue(self, queue: JobQueue, writer: GroupCommit) -> None:
        """All jobs at one moment; in pieces, each one transaction."""
        simulation = self._simulation
        rng, sigma = stream(simulation.seed, "predictions"), simulation.prediction_sigma

        def job(number: int) -> NewJob:
            length_s = self._lengths_s[number]
            return NewJob(
                id=f"j{number}",
                kind="run",
                payload={"n": number, "seconds": length_s},
                group_key=f"g{number % simulation.num_groups}",
                max_tries=simulation.max_tries,
                deadline_s=1e6,
                predicted_s=0.0 if sigma is None else length_s * rng.lognormvariate(0.0, sigma),
            )

        def put(jobs: Sequence[NewJob]) -> None:
            with writer.store.transaction():
                for one in jobs:
                    queue.enqueue(one)

        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        with loop.holding():
            for first in range(0, simulation.num_jobs, _ENQUEUE_AT_ONCE):
                last = min(first + _ENQUEUE_AT_ONCE, simulation.num_jobs)
                jobs = [job(number) for number in range(first, last)]
                await writer.run(partial(put, jobs))

    def _listener(self, loop: asyncio.AbstractEventLoop) -> Callable[[Event], None]:
        marks = {math.ceil(s * self._simulation.num_jobs): f"{s:g}" for s in _PROGRESS_SHARES}

        def listen(event: Event) -> None:
            counts = self._counts
            counts[event.kind] = counts.get(event.kind, 0) + 1
            if event.kind in ("job.done", "job.failed"):
                num_over = counts.get("job.done", 0) + counts.get("job.failed", 0)
                if num_over in marks:
                    self._memory[marks[num_over]] = round(_rss_mib(), 1)
                if num_over == self._simulation.num_jobs:
                    self._end_s = loop.time()
                    loop.call_soon_threadsafe(self._over.set)

        return listen

    def _report(
        self, store: RunStore, began_s: float, wall_s: float, cpu_s: float, start_rss_mib: float
    ) -> SimulationReport:
        simulation, counts = self._simulation, store.jobs.counts()
        finished_s = [s for s in self._provider.finished_s if s > 0]
        bound_s = lower_bound_s(finished_s, simulation.num_workers)
        makespan_s = self._end_s - began_s
        job_events = sum(n for kind, n in self._counts.items() if kind.startswith("job."))
        return SimulationReport(
            jobs=simulation.num_jobs,
            workers=simulation.num_workers,
            efficiency=round(bound_s / makespan_s, 4),
            makespan_s=round(makespan_s, 3),
            lower_bound_s=round(bound_s, 3),
            best_found_s=(
                round(best_found_s(finished_s, simulation.num_workers), 3)
                if len(finished_s) <= _MOST_SEARCHED
                else None
            ),
            longest_first_s=round(
                list_schedule_s(sorted(finished_s, reverse=True), simulation.num_workers), 3
            ),
            lost=simulation.num_jobs - counts["done"] - counts["failed"],
            duplicated=store.events.count("job.done") - counts["done"],
            gave_up=counts["failed"],
            deaths=self._provider.num_deaths,
            retries=self._counts.get("job.requeued", 0),
            job_events=job_events,
            controller_cpu_ms_per_event=round(1000 * cpu_s / job_events, 4),
            cpu_s=round(cpu_s, 2),
            wall_s=round(wall_s, 2),
            peak_rss_mib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            rss_mib_at_done_share=self._memory,
            start_rss_mib=round(start_rss_mib, 1),
            database_mib=round(store.path.stat().st_size / 2**20, 1),
        )


def _lengths(simulation: Simulation) -> list[float]:
    rng = stream(simulation.seed, "lengths")
    mu = math.log(simulation.mean_s) - simulation.sigma**2 / 2
    return [rng.lognormvariate(mu, simulation.sigma) for _ in range(simulation.num_jobs)]


def _rss_mib() -> float:
    return float(psutil.Process().memory_info().rss) / 2**20


def _require(simulation: Simulation) -> None:
    hazards = simulation.hazards
    if simulation.num_jobs < 1 or simulation.num_workers < 1:
        raise ConfigError(
            f"{simulation.num_jobs} jobs on {simulation.num_workers} workers; expected at least 1 "
            f"of each; set --jobs and --workers"
        )
    if not 0 <= hazards.deaths_per_minute < 1:
        raise ConfigError(
            f"deaths per minute {hazards.deaths_per_minute}; expected a share from 0 to below 1; "
            f"0.01 means that 1 % of the workers die in a minute"
        )
