"""A whole local fleet with real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from nestling.core.clock import SystemClock
from nestling.fleet.budget import Budget
from nestling.fleet.memory import MemoryLimits
from nestling.fleet.pool import Pool, PoolLimits
from nestling.fleet.providers.local import LocalProvider, LocalWorkers
from nestling.fleet.queue import JobQueue
from nestling.fleet.slots import Slot
from nestling.fleet.watch import JobWatch
from nestling.store import GroupCommit, RunStore
from nestling.store.jobs import JobRecord, NewJob


@dataclass
class Fleet:
    """Queue, pool and workers of one test."""

    store: RunStore
    writer: GroupCommit
    queue: JobQueue
    provider: LocalProvider
    pool: Pool
    watch: JobWatch

    async def result(self, job_id: str) -> JobRecord:
        over = self.watch.expect(job_id)
        if self.store.jobs.get(job_id).state in ("queued", "running"):
            await over
        return self.store.jobs.get(job_id)

    async def do(self, kind: str, payload: dict | None = None, **fields) -> JobRecord:
        number = len(self.store.jobs.all())
        queued = self.queue.enqueue(
            NewJob(id=f"job{number}", kind=kind, payload=payload or {}, **fields)
        )
        return await self.result(queued.id)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110 (another process is what changes)
            await asyncio.sleep(0.01)


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Wait for something that another process does."""
    return _until


def _local_workers(folder: Path, handlers: str, settings: dict, **options) -> LocalWorkers:
    here = str(Path(__file__).parent)
    return LocalWorkers(
        handlers=handlers,
        settings=settings,
        logs=folder / "logs",
        beat_s=0.1,
        environment={"PYTHONPATH": here},
        **options,
    )


@asynccontextmanager
async def open_fleet(
    folder: Path,
    *,
    size: int = 1,
    lease_s: float = 30.0,
    handlers: str = "fleet_handlers:make_handlers",
    settings: dict | None = None,
    session: str = "s1",
    limits: PoolLimits | None = None,
    make_budget: Callable[[RunStore], Budget] | None = None,
    slots: Sequence[Slot] = (),
    memory: MemoryLimits | None = None,
) -> AsyncIterator[Fleet]:
    clock = SystemClock()
    with RunStore(folder / "run.db") as store, GroupCommit(store) as writer:
        queue = JobQueue(store, clock=clock, session=session, lease_s=lease_s)
        queue.recover()
        workers = _local_workers(folder, handlers, settings or {}, slots=slots, memory=memory)
        provider = LocalProvider(workers, writer)
        pool = Pool(
            queue=queue,
            writer=writer,
            provider=provider,
            size=size,
            clock=clock,
            budget=make_budget(store) if make_budget else None,
            guard=provider.guard,
            limits=limits or PoolLimits(backoff_s=0.01, expire_every_s=0.05),
        )
        fleet = Fleet(store, writer, queue, provider, pool, JobWatch(store))
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(pool.run())
            try:
                yield fleet
                pool.stop()
                await serving
            finally:
                serving.cancel()
        await provider.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Fleet]]:
    return lambda **options: open_fleet(tmp_path, **options)
