"""Keeps workers alive and jobs moving: claim, send, follow, finish; again after every death.

One task per worker. A worker that dies, falls silent, or passes a deadline is ended with its whole
tree and replaced; its job is queued again, at most `max_tries` times. Idle workers wait for the
store's events, one woken per queued job.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from nestling.core.clock import Clock
from nestling.core.errors import FleetError
from nestling.fleet.attempt import Attempt
from nestling.fleet.budget import GRACE_S, Budget, BudgetRefusedError
from nestling.fleet.finish import finish
from nestling.fleet.memory import MemoryGuard
from nestling.fleet.messages import Ready, Stop
from nestling.fleet.provider import Node, Provider, TypedNode
from nestling.fleet.queue import Claim, JobQueue
from nestling.store import GroupCommit
from nestling.store.events import Event

__all__ = ["Pool", "PoolLimits"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """When the pool loses patience."""

    start_timeout_s: float = 120.0
    """From launch to `Ready`; the first start on a cold disk loads torch."""
    backoff_s: float = 0.5
    """First pause after a death; doubled each time in a row."""
    max_backoff_s: float = 30.0
    max_failed_starts: int = 5
    """In a row, of one worker; then the pool raises: the cause is not going away."""
    expire_every_s: float = 1.0
    idle_s: float | None = None
    """A worker without work for so long is ended, and none is started before work waits for it.
    None: all workers are kept, as is right where they cost nothing."""


class Pool:
    """A fixed number of workers of one provider."""

    def __init__(
        self,
        *,
        queue: JobQueue,
        writer: GroupCommit,
        provider: Provider,
        size: int,
        clock: Clock,
        budget: Budget | None = None,
        guard: MemoryGuard | None = None,
        limits: PoolLimits | None = None,
    ) -> None:
        if size < 1:
            raise FleetError(f"a pool of {size} workers; expected at least 1; set fleet slots to 1")
        self._queue = queue
        self._writer = writer
        self._provider = provider
        self._size = size
        self._clock = clock
        self._budget = budget
        self._guard = guard
        self._limits = limits or PoolLimits()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._resting: deque[asyncio.Future[None]] = deque()
        """Workers that are not started because there is no work for them."""
        self._num_coming = 0
        """Workers that are being started or look for a job: as many jobs need no further one."""
        self._stopping = asyncio.Event()
        self._nodes: dict[str, Node] = {}
        self._machines: dict[str, str] = {}
        """Token of a try to the machine type that its money is reserved for."""
        self._served: set[str] = set()
        """Tokens of the tries that run now; of these, those with a heartbeat and those over."""
        self._beaten: set[str] = set()
        self._over: set[str] = set()

    async def run(self) -> None:
        """Serve until `stop`; cancelling ends every worker and queues its job again.

        Raises `FleetError` when workers cannot be started.
        """
        loop = asyncio.get_running_loop()
        unsubscribe = self._queue.store.events.subscribe(self._listener(loop))
        try:
            async with asyncio.TaskGroup() as group:
                clerks = [group.create_task(self._expire_leases())]
                if self._guard is not None:
                    clerks.append(group.create_task(self._guard.watch()))
                workers = [
                    group.create_task(self._keep_worker(f"{self._provider.lane}-{number}"))
                    for number in range(self._size)
                ]
                await asyncio.wait(workers)
                for clerk in clerks:
                    clerk.cancel()
        except BaseExceptionGroup as errors:
            cause = _only_fleet_error(errors)
            if cause is None:
                raise
            raise cause from errors
        finally:
            unsubscribe()

    def stop(self) -> None:
        """Give out no more jobs; `run` returns once those that run are over."""
        self._queue.drain()
        self._stopping.set()
        for waiting in (self._idle, self._resting):
            while waiting:
                _wake(waiting.popleft())

    def _listener(self, loop: asyncio.AbstractEventLoop) -> Callable[[Event], None]:
        def listen(event: Event) -> None:
            if event.kind in ("job.queued", "job.requeued"):
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._wake_one)

        return listen

    def _wake_one(self) -> None:
        """Wake an idle worker, and one that rests: it finds out whether it is needed too."""
        for waiting in (self._idle, self._resting):
            while waiting:
                future = waiting.popleft()
                if not future.done():
                    _wake(future)
                    break

    async def _expire_leases(self) -> None:
        """End leases that are over; one that ended while we stood still ourselves is forgiven."""
        every_s = min(self._limits.expire_every_s, self._queue.lease_s / 8)
        last_s = self._clock.monotonic()
        while True:
            await asyncio.sleep(every_s)
            now_s = self._clock.monotonic()
            stalled_s = now_s - last_s - every_s
            if stalled_s > self._queue.lease_s / 4:
                await self._writer.run(partial(self._queue.forgive, stalled_s))
            last_s = now_s
            beaten, self._beaten = sorted(self._beaten), set()
            over = await self._writer.run(partial(self._keep_and_expire, beaten))
            self._over |= self._served.intersection(over)
            # In case another process queued a job, or there is memory for one again.
            self._wake_one()

    def _keep_and_expire(self, beaten: Sequence[str]) -> list[str]:
        """The heartbeats since the last time, then the leases that had none, as one change."""
        with self._queue.store.joined():
            over = self._queue.keep(beaten)
            self._queue.expire()
        return over

    async def _keep_worker(self, name: str) -> None:
        failed_starts = deaths = 0
        while await self._is_needed():
            words = ""
            try:
                with self._coming():
                    node = await self._launch(name)
                    if node is None:
                        break
                    self._nodes[name] = node
                    started, words = await self._ready(node)
                if started:
                    failed_starts = 0
                    served = await _Server(self, node).serve()
                    deaths = 0 if served else deaths + 1
                else:
                    failed_starts += 1
            except FleetError as error:
                failed_starts += 1
                words = str(error)
            finally:
                await self._provider.terminate(name)
            if failed_starts >= self._limits.max_failed_starts:
                raise FleetError(
                    f"worker {name} could not be started {failed_starts} times in a row; expected "
                    f"it to say that it is ready within {self._limits.start_timeout_s:g} s; its "
                    f"last words: {words or '(none)'}"
                )
            if failed_starts or deaths:
                await self._pause(failed_starts + deaths)

    async def _is_needed(self) -> bool:
        """Waits until a worker more would have work; False when the pool stops."""
        loop = asyncio.get_running_loop()
        while self._limits.idle_s is not None and not self._stopping.is_set():
            # Waiting begins before the look, so a job queued in between still wakes us.
            future: asyncio.Future[None] = loop.create_future()
            self._resting.append(future)
            num_waiting = await self._writer.run(
                lambda: self._queue.store.jobs.waiting(self._provider.lane)
            )
            if num_waiting > self._num_coming:
                with suppress(ValueError):
                    self._resting.remove(future)
                break
            await future
        return not self._stopping.is_set()

    @contextmanager
    def _coming(self) -> Iterator[None]:
        self._num_coming += 1
        try:
            yield
        finally:
            self._num_coming -= 1

    async def _launch(self, name: str) -> Node | None:
        """A started worker; None when the pool stops first, as a cluster may be out of room."""
        launching = asyncio.ensure_future(self._provider.launch(name))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((launching, stopping), return_when=asyncio.FIRST_COMPLETED)
            return launching.result() if launching.done() else None
        finally:
            stopping.cancel()
            if not launching.done():
                launching.cancel()
                await asyncio.wait((launching,))

    async def _ready(self, node: Node) -> tuple[bool, str]:
        try:
            async with asyncio.timeout(self._limits.start_timeout_s):
                message = await node.receive()
        except (TimeoutError, FleetError):
            words = await node.last_words()
            _log.warning("worker %s did not start: %s", node.name, words)
            return False, words
        return isinstance(message, Ready), f"first message was {type(message).__name__}"

    async def _pause(self, failures: int) -> None:
        pause_s = min(
            self._limits.backoff_s * 2 ** min(failures - 1, 16), self._limits.max_backoff_s
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()

    async def next_claim(self, worker: str) -> Claim | None:
        """The next job for a worker; waits; None when the pool stops or it was idle too long."""
        with self._coming():
            return await self._next_claim(worker)

    async def _next_claim(self, worker: str) -> Claim | None:
        loop = asyncio.get_running_loop()
        idle_s = self._limits.idle_s
        end_s = None if idle_s is None else loop.time() + idle_s
        while not self._stopping.is_set():
            # Waiting begins before the look, so a job queued in between still wakes us.
            future: asyncio.Future[None] = loop.create_future()
            self._idle.append(future)
            claim = await self._claim(worker)
            if claim is not None:
                if future.done():
                    self._wake_one()  # that call was for another job
                else:
                    self._idle.remove(future)
                return claim
            try:
                async with asyncio.timeout_at(end_s):
                    await asyncio.shield(future)
            except TimeoutError:
                if not future.done():
                    self._idle.remove(future)
                    return None
        return None

    async def _claim(
        self, worker: str, before: Callable[[], object] = lambda: None
    ) -> Claim | None:
        """A job if there is one, taken in the transaction of the change `before`.

        Cancelled in between, the job is given back.
        """
        taken: list[Claim] = []

        def take() -> Claim | None:
            with self._queue.store.joined():
                before()
                claim = None if self._stopping.is_set() else self._take(worker)
            taken[:] = [] if claim is None else [claim]
            return claim

        try:
            return await finish(self._writer.run(take))
        except asyncio.CancelledError:
            for claim in taken:
                await self.end_try(claim, 0.0, partial(self._queue.give_back, claim.token))
            raise

    def _take(self, worker: str) -> Claim | None:
        """Claim a job and set its money aside, in one transaction; what is refused is failed.

        None also while memory is short, unless nothing runs: then one job goes on.
        """
        while True:
            with self._queue.store.joined():
                if self._is_short_of_memory() and self._queue.store.jobs.leases():
                    return None
                claim = self._queue.claim(worker, lane=self._provider.lane, num_workers=self._size)
                if claim is None or self._budget is None:
                    return claim
                self._machines[claim.token] = self._machine_of(worker)
                try:
                    self._budget.reserve(
                        claim.token,
                        machine=self._machines[claim.token],
                        seconds=claim.job.deadline_s + GRACE_S,
                        episode_id=claim.job.episode_id,
                        job_id=claim.job.id,
                        family=claim.job.family,
                    )
                except BudgetRefusedError as error:
                    del self._machines[claim.token]
                    self._queue.fail(claim.token, "budget.refused", str(error), retry=False)
                else:
                    return claim

    def _machine_of(self, worker: str) -> str:
        node = self._nodes.get(worker)
        return node.machine if isinstance(node, TypedNode) else self._provider.machine

    def _is_short_of_memory(self) -> bool:
        return self._guard is not None and not self._guard.has_room

    async def end_try(self, claim: Claim, seconds: float, change: Callable[[], object]) -> None:
        """Record how a try ended and what it cost, in one transaction."""
        await finish(self._writer.run(partial(self._end, claim, seconds, change)))
        self._machines.pop(claim.token, None)

    async def end_try_and_claim(
        self, claim: Claim, seconds: float, change: Callable[[], object], worker: str
    ) -> Claim | None:
        """As `end_try`, and take the next job in the same transaction; None when there is none."""
        following = await self._claim(worker, partial(self._end, claim, seconds, change))
        self._machines.pop(claim.token, None)
        return following

    def _end(self, claim: Claim, seconds: float, change: Callable[[], object]) -> None:
        with self._queue.store.joined():
            change()
            if self._budget is not None:
                machine = self._machines.get(claim.token, self._provider.machine)
                self._budget.settle(claim.token, machine=machine, seconds=seconds)

    def serve(self, token: str) -> None:
        """A try begins."""
        self._served.add(token)

    def beat(self, token: str) -> bool:
        """Note a sign of life, to be written with those of the others; False: the lease is over."""
        if token in self._over:
            return False
        self._beaten.add(token)
        return True

    def forget(self, token: str) -> None:
        """Its try is over."""
        self._served.discard(token)
        self._beaten.discard(token)
        self._over.discard(token)

    @property
    def queue(self) -> JobQueue:
        """The queue it serves."""
        return self._queue

    @property
    def writer(self) -> GroupCommit:
        """The store's writer."""
        return self._writer

    @property
    def clock(self) -> Clock:
        """The clock of deadlines."""
        return self._clock


class _Server:
    """One life of one worker."""

    def __init__(self, pool: Pool, node: Node) -> None:
        self._pool = pool
        self._node = node

    async def serve(self) -> int:
        """Do jobs until the worker must go; returns how many it ended by itself."""
        num_served = 0
        claim: Claim | None = None
        while claim := claim or await self._pool.next_claim(self._node.name):
            attempt = Attempt(self._pool, self._node, claim)
            if not await attempt.run():
                return num_served
            claim = attempt.next_claim
            num_served += 1
        with suppress(FleetError):
            await self._node.send(Stop())
        return max(num_served, 1)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _only_fleet_error(errors: BaseExceptionGroup[BaseException]) -> FleetError | None:
    """The first `FleetError` when nothing else went wrong."""
    fleet, rest = errors.split(FleetError)
    while isinstance(fleet, BaseExceptionGroup):
        fleet = fleet.exceptions[0]  # type: ignore[assignment]
    return fleet if rest is None and isinstance(fleet, FleetError) else None
