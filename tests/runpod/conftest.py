"""A whole fleet of pods: a simulated account, real worker processes, the real queue and pool."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nestling.core.clock import SystemClock
from nestling.core.listening import bound_socket
from nestling.core.rundir import ArtifactStore
from nestling.fleet.pods.config import RunpodFleet
from nestling.fleet.pool import Pool, PoolLimits
from nestling.fleet.providers.runpod import RunpodProvider
from nestling.fleet.providers.runpod_open import KEY_VARIABLE, PodWork, open_provider
from nestling.fleet.queue import JobQueue
from nestling.fleet.runpod_simulator.script import Script
from nestling.fleet.runpod_simulator.server import SimulatedRunpod, simulated_runpod
from nestling.fleet.watch import JobWatch
from nestling.store import GroupCommit, RunStore
from nestling.store.jobs import JobRecord, NewJob

HERE = Path(__file__).parent
IMAGE = "registry.example/pod@sha256:" + "0" * 64
EVAL_SECRET = b"canary: the seed of the hidden items"
API_KEY = "canary-key-of-the-account"

QUICK = {
    "tick_s": 0.2,
    "cool_s": 0.3,
    "grace_s": 1.0,
    "idle_s": 30.0,
    "boot_s": 20.0,
    "create_s": 3.0,
    "heartbeat_s": 15.0,
    "lost_controller_s": 30.0,
}


def set_pod_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv(KEY_VARIABLE, API_KEY)


@pytest.fixture(autouse=True)
def _pods_can_import_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    set_pod_environment(monkeypatch)


@dataclass
class Room:
    """One test's fleet."""

    simulator: SimulatedRunpod
    provider: RunpodProvider
    store: RunStore
    writer: GroupCommit
    queue: JobQueue
    pool: Pool
    watch: JobWatch
    artifacts: ArtifactStore

    @property
    def account(self):
        return self.simulator.app.account

    async def result(self, job_id: str) -> JobRecord:
        over = self.watch.expect(job_id)
        if self.store.jobs.get(job_id).state in ("queued", "running"):
            await over
        return self.store.jobs.get(job_id)

    async def do(self, kind: str, payload: dict | None = None, **fields) -> JobRecord:
        number = len(self.store.jobs.all())
        queued = self.queue.enqueue(
            NewJob(id=f"job{number}", kind=kind, payload=payload or {}, lane="pod", **fields)
        )
        return await self.result(queued.id)

    def events(self, kind: str) -> list:
        found, seq = [], 0
        while more := self.store.events.since(seq):
            found += [event for event in more if event.kind == kind]
            seq = more[-1].seq
        return found


def free_port() -> int:
    with bound_socket("127.0.0.1", 0) as taken:
        return int(taken.getsockname()[1])


def fleet_config(url: str, **settings: Any) -> RunpodFleet:
    port = free_port()
    ladder = settings.pop("ladder", None) or [
        {"gpu": "a5000", "max_usd_per_hour": 0.4},
        {"gpu": "a40", "max_usd_per_hour": 0.6},
        {"gpu": "rtx4090", "max_usd_per_hour": 0.9},
        {"gpu": "a6000", "max_usd_per_hour": 0.6},
    ]
    document = QUICK | {
        "ladder": ladder,
        "image": IMAGE,
        "address": f"https://127.0.0.1:{port}",
        "listen": f"127.0.0.1:{port}",
        "api_url": url,
        "workers": 2,
    }
    return RunpodFleet.model_validate(document | settings)


@asynccontextmanager
async def simulated(folder: Path, **script: Any) -> AsyncIterator[SimulatedRunpod]:
    account = Script.model_validate({"boot_s": 0.1, "credit_usd": 100.0} | script)
    async with simulated_runpod(account, folder=folder / "account", key=API_KEY) as running:
        yield running


@asynccontextmanager
async def open_pods(
    folder: Path,
    script: Script | None,
    *,
    simulator: SimulatedRunpod | None = None,
    speed: float = 1.0,
    beat_s: float = 1.0,
    lease_s: float = 30.0,
    closes: bool = True,
    handlers: str = "pod_handlers:make_handlers",
    **settings: Any,
) -> AsyncIterator[Room]:
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        if simulator is None:
            assert script is not None
            simulator = await stack.enter_async_context(
                simulated_runpod(script, folder=folder / "account", speed=speed, key=API_KEY)
            )
        store = stack.enter_context(RunStore(folder / "run.db"))
        writer = stack.enter_context(GroupCommit(store))
        config = fleet_config(simulator.url, **settings)
        artifacts = ArtifactStore(folder / "artifacts")
        provider = await open_provider(
            config,
            PodWork(
                handlers=handlers,
                settings={},
                private={"eval-secret": EVAL_SECRET},
                beat_s=beat_s,
            ),
            writer=writer,
            artifacts=artifacts,
            state=folder / "state",
            clock=clock,
        )
        queue = JobQueue(store, clock=clock, session="s1", lease_s=lease_s)
        queue.recover()
        pool = Pool(
            queue=queue,
            writer=writer,
            provider=provider,
            size=config.workers,
            clock=clock,
            limits=PoolLimits(
                idle_s=config.idle_s, backoff_s=0.05, max_backoff_s=0.5, expire_every_s=0.1
            ),
        )
        await provider.sweep()
        room = Room(simulator, provider, store, writer, queue, pool, JobWatch(store), artifacts)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(pool.run())
            try:
                yield room
                pool.stop()
                await serving
            finally:
                serving.cancel()
                if closes:
                    await provider.close()


@pytest.fixture
def pods(tmp_path: Path) -> Callable[..., Any]:
    """`async with pods(boot_s=..., fleet={...}) as room`."""

    def start(fleet: dict | None = None, **script: Any):
        account = Script.model_validate({"boot_s": 0.1, "credit_usd": 100.0} | script)
        return open_pods(tmp_path, account, **(fleet or {}))

    return start


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110 (another process is what changes)
            await asyncio.sleep(0.02)
