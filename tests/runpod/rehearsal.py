"""A fleet of pods in virtual time: real worker processes, real HTTPS, hours in seconds.

Time stands still while anything real is at work: a worker that boots, answers or is being killed, a
thread, a commit. When everything waits for time, it jumps to the next timer. Jobs take virtual time
too: their handler waits for a file, which a timer of the loop makes.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from nestling.core.errors import FleetError
from nestling.core.rundir import ArtifactStore
from nestling.fleet.pool import Pool, PoolLimits
from nestling.fleet.providers.runpod import RunpodProvider
from nestling.fleet.providers.runpod_open import PodWork, open_provider
from nestling.fleet.queue import JobQueue
from nestling.fleet.runpod_simulator.app import RunpodApp
from nestling.fleet.runpod_simulator.script import Script
from nestling.fleet.runpod_simulator.server import simulated_runpod
from nestling.fleet.simulate_loop import VirtualClock, VirtualTimeLoop
from nestling.fleet.watch import JobWatch
from nestling.store import GroupCommit, RunStore
from nestling.store.jobs import NewJob

from .conftest import API_KEY, EVAL_SECRET, fleet_config

_REAL_LIMIT_S = 100.0
"""Longest real wait for a sign of life; then time moves on, as for a worker that hangs."""


class PodTimeLoop(VirtualTimeLoop):
    """Jumps only when nothing real is at work."""

    def __init__(self) -> None:
        self._num_threads = 0
        self.is_at_work: Callable[[], bool] = lambda: False
        super().__init__()
        self._selector = _Selector(self)  # type: ignore[assignment]
        self._make_self_pipe_again()

    def _make_self_pipe_again(self) -> None:
        self._selector.register(self._ssock, selectors.EVENT_READ, (self._self_reader(), None))

    def _self_reader(self) -> Any:
        return asyncio.Handle(self._read_from_self, (), self, None)

    def run_in_executor(self, executor, function, *arguments):
        future = super().run_in_executor(executor, function, *arguments)
        self._num_threads += 1
        future.add_done_callback(lambda _: self._thread_over())
        return future

    def _thread_over(self) -> None:
        self._num_threads -= 1

    @property
    def is_held(self) -> bool:
        return super().is_held or self._num_threads > 0 or self.is_at_work()


class _Selector(selectors.DefaultSelector):
    """Real events first; else wait for one while time is held; else jump."""

    def __init__(self, loop: PodTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        begun = time.monotonic()
        while not ready and timeout > 0 and self._loop.is_held:
            ready = super().select(0.02)
            if time.monotonic() - begun > _REAL_LIMIT_S:
                break
        if not ready and timeout > 0:
            self._loop.jump(timeout)
        return ready


class _InProcess(httpx.ASGITransport):
    """The simulated API without a socket between, so that no request is ever on its way."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except AssertionError as error:  # an answer that was cut short
            raise httpx.RemoteProtocolError("connection closed", request=request) from error


class _HoldingWriter(GroupCommit):
    async def run(self, change):
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        with loop.holding():
            return await super().run(change)


@dataclass(kw_only=True)
class Rehearsal:
    """What came of it; times in virtual seconds since the start."""

    usd: float
    makespan_s: float
    first_start_s: float
    closed_s: float
    left: int
    made: int
    states: list[str]
    tries: list[int]
    events: list[tuple[float, str, str, dict]]
    seen: str
    statuses: dict[int, int]
    last_gone_s: float
    waits: list[tuple[float, float]] = field(default_factory=list)
    error: str = ""

    def of(self, kind: str) -> list[tuple[float, str, str, dict]]:
        return [event for event in self.events if event[1] == kind]


def rehearse(folder: Path, script: Script, **options: Any) -> Rehearsal:
    with asyncio.Runner(loop_factory=PodTimeLoop) as runner:
        return runner.run(_rehearse(folder, script, **options))


async def _rehearse(
    folder: Path,
    script: Script,
    *,
    durations_s: list[float],
    workers: int = 2,
    warm: int = 0,
    linger_s: float = 0.0,
    fleet: dict | None = None,
    max_tries: int = 5,
) -> Rehearsal:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, PodTimeLoop)
    clock = VirtualClock(loop)
    start_at = clock.now()
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            simulated_runpod(script, folder=folder / "account", key=API_KEY)
        )
        app = running.app
        store = stack.enter_context(RunStore(folder / "run.db", clock=clock))
        writer = stack.enter_context(_HoldingWriter(store))
        usual = {
            "tick_s": 12.0,
            "cool_s": 60.0,
            "grace_s": 90.0,
            "idle_s": 300.0,
            "boot_s": 600.0,
            "create_s": 60.0,
            "heartbeat_s": 60.0,
            "lost_controller_s": 900.0,
            "workers": workers,
        }
        config = fleet_config(running.url, **usual | (fleet or {}))
        provider = await open_provider(
            config,
            PodWork(
                handlers="pod_handlers:make_handlers",
                settings={},
                private={"eval-secret": EVAL_SECRET},
                beat_s=1000.0,
            ),
            writer=writer,
            artifacts=ArtifactStore(folder / "artifacts"),
            state=folder / "state",
            clock=clock,
            transport=_InProcess(app=app),
        )
        jobs = _Jobs(folder, store, durations_s)
        loop.is_at_work = lambda: _is_at_work(app, provider, jobs)
        queue = JobQueue(store, clock=clock, session="s1", lease_s=1e6)
        pool = Pool(
            queue=queue,
            writer=writer,
            provider=provider,
            size=workers,
            clock=clock,
            limits=PoolLimits(idle_s=config.idle_s, start_timeout_s=config.ready_s),
        )
        error = ""
        stack.push_async_callback(_closed_quietly, provider)
        await provider.sweep()
        if warm:
            await provider.wait_for_pods(warm)
        watch = JobWatch(store)
        undo = store.events.subscribe(lambda event: jobs.on_event(event, loop))
        try:
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(pool.run())
                for number in range(len(durations_s)):
                    new = NewJob(
                        id=f"j{number}",
                        kind="held",
                        payload={"until": str(jobs.path(number))},
                        lane="pod",
                        deadline_s=1e6,
                        max_tries=max_tries,
                    )
                    over = watch.expect(new.id)
                    await writer.run(lambda new=new: queue.enqueue(new))
                    jobs.waiting.append(over)
                done = group.create_task(_all_of(jobs.waiting))
                await asyncio.wait((done, serving), return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(linger_s)
                pool.stop()
                await serving
        except* FleetError as errors:
            error = str(errors.exceptions[0])
        closing_s = loop.time()
        await provider.close()
        undo()
        events = [
            (event.at - start_at, event.kind, event.subject, event.data)
            for event in store.events.since(0, limit=100_000)
        ]
        ends = [event[0] for event in events if event[1] in ("job.done", "job.failed")]
        starts = [event[0] for event in events if event[1] == "job.started"]
        app.account.settle()
        return Rehearsal(
            usd=app.account.spent_usd(),
            makespan_s=max(ends, default=0.0),
            first_start_s=min(starts, default=0.0),
            closed_s=closing_s,
            left=len(app.account.live_pods()),
            made=len(app.account.pods),
            states=[job.state for job in store.jobs.all()],
            tries=[job.tries for job in store.jobs.all()],
            events=events,
            seen=app.seen.text(),
            statuses=dict(app.seen.statuses),
            last_gone_s=max([e[0] for e in events if e[1] == "pod.gone"], default=0.0),
            error=error,
        )


async def _closed_quietly(provider: RunpodProvider) -> None:
    with suppress(FleetError):
        await provider.close()


async def _all_of(futures: list[asyncio.Future]) -> None:
    for future in futures:
        await future


class _Jobs:
    """Files that end jobs, made in virtual time."""

    def __init__(self, folder: Path, store: RunStore, durations_s: list[float]) -> None:
        self._folder = folder / "until"
        self._folder.mkdir()
        self._durations_s = durations_s
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.waiting: list[asyncio.Future] = []

    def path(self, number: int) -> Path:
        return self._folder / f"j{number}"

    def on_event(self, event, loop) -> None:
        loop.call_soon_threadsafe(self._on_event, event.kind, event.subject, loop)

    def _on_event(self, kind: str, job_id: str, loop) -> None:
        if kind == "job.started":
            duration_s = self._durations_s[int(job_id[1:])]
            self._timers[job_id] = loop.call_later(duration_s, self._end, job_id)
        elif kind in ("job.requeued", "job.failed") and job_id in self._timers:
            self._timers.pop(job_id).cancel()

    def _end(self, job_id: str) -> None:
        (self._folder / job_id).touch()

    def is_held(self, job_id: str) -> bool:
        return not (self._folder / job_id).exists()


def _is_at_work(app: RunpodApp, provider: RunpodProvider, jobs: _Jobs) -> bool:
    """Whether some process is about to do something that time must wait for."""
    for pod in app.account.pods.values():
        if not pod.is_alive or pod.deleted_at is not None:
            continue
        link = provider.channel.links.get(pod.name)
        if link is None or not link.is_parked:
            return True
        if link.gone is None and not link.is_ready:
            return True
        if link.busy_with is not None and not jobs.is_held(link.busy_with):
            return True
    return False
