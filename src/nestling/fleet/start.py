"""Bring a fleet up for one run and take it down again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nestling.core.clock import Clock
from nestling.core.rundir import ArtifactStore
from nestling.fleet.budget import Budget
from nestling.fleet.finish import finish
from nestling.fleet.memory import MemoryGuard
from nestling.fleet.pool import Pool, PoolLimits
from nestling.fleet.predict import Predictor
from nestling.fleet.process_tree import boot_id, start_ticks
from nestling.fleet.provider import Provider
from nestling.fleet.queue import JobQueue
from nestling.fleet.runner import FleetRunner, RunnerSettings
from nestling.fleet.watch import JobWatch
from nestling.store import GroupCommit

__all__ = ["running_fleet", "session_name"]


def session_name() -> str:
    """This process's life, told from every other on this machine."""
    pid = os.getpid()
    return f"{boot_id()[:8]}-{pid}-{start_ticks(pid)}"


@asynccontextmanager
async def running_fleet(
    *,
    writer: GroupCommit,
    provider: Provider,
    size: int,
    artifacts: ArtifactStore,
    settings: RunnerSettings,
    clock: Clock,
    budget: Budget | None = None,
    guard: MemoryGuard | None = None,
    predictor: Predictor | None = None,
    lease_s: float = 60.0,
    limits: PoolLimits | None = None,
) -> AsyncIterator[FleetRunner]:
    """A job runner over `size` workers; the caller must be the run's one controller.

    What an earlier controller left is settled first: its leases are freed, its money counted, its
    processes ended. On the way out running jobs finish; after an error or an interruption they are
    queued again for the next controller. Raises `FleetError` when workers cannot be started.
    """
    queue = JobQueue(writer.store, clock=clock, session=session_name(), lease_s=lease_s)
    await writer.run(queue.recover)
    if budget is not None:
        await writer.run(budget.recover)
    watch = JobWatch(writer.store)
    try:
        await provider.sweep()
        pool = Pool(
            queue=queue,
            writer=writer,
            provider=provider,
            size=size,
            clock=clock,
            budget=budget,
            guard=guard,
            limits=limits,
        )
        runner = FleetRunner(
            queue=queue,
            writer=writer,
            watch=watch,
            artifacts=artifacts,
            settings=settings,
            budget=budget,
            predictor=predictor,
        )
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(pool.run())
            try:
                yield runner
                pool.stop()
                await serving
            finally:
                serving.cancel()
    except BaseExceptionGroup as errors:
        raise _only(errors) from None
    finally:
        watch.close()
        await finish(provider.close())


def _only(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error of a group, so that a caller can catch it by its type; else the group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
