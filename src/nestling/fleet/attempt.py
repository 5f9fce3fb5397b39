"""One try of one job: hand it to a worker, follow its messages, end it in time.

Whatever happens ends in one change of the queue: the result, a failure, or the job given back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from nestling.core.clock import Clock
from nestling.core.errors import FleetError
from nestling.fleet.messages import (
    Beat,
    Done,
    Failed,
    FromWorker,
    Progress,
    Ready,
    Stage,
    Work,
)
from nestling.fleet.provider import Node, WorkerEndedError
from nestling.fleet.queue import Claim, JobQueue
from nestling.store import GroupCommit

__all__ = ["Attempt", "Desk"]

_GRACE_S = 0.2


class Desk(Protocol):
    """What a try needs of the pool."""

    @property
    def queue(self) -> JobQueue:
        """Where the job is from."""
        ...

    @property
    def writer(self) -> GroupCommit:
        """The store's writer."""
        ...

    @property
    def clock(self) -> Clock:
        """The clock of deadlines."""
        ...

    def serve(self, token: str) -> None:
        """A try begins."""
        ...

    def beat(self, token: str) -> bool:
        """Note a sign of life; False: the lease is over."""
        ...

    def forget(self, token: str) -> None:
        """Its try is over."""
        ...

    async def end_try(self, claim: Claim, seconds: float, change: Callable[[], object]) -> None:
        """Record how a try ended and what it cost."""
        ...

    async def end_try_and_claim(
        self, claim: Claim, seconds: float, change: Callable[[], object], worker: str
    ) -> Claim | None:
        """As `end_try`, and take the worker's next job."""
        ...


class Attempt:
    """One try of one job on one worker."""

    def __init__(self, desk: Desk, node: Node, claim: Claim) -> None:
        self._desk = desk
        self._node = node
        self._claim = claim
        self._queue = desk.queue
        self._started_s = desk.clock.monotonic()
        self._deadline_s = self._started_s + claim.job.deadline_s
        self._heard_s = self._kept_s = self._started_s
        self._stage = "start"
        self._stage_end_s = math.inf
        self._grace_end_s = math.inf
        self.next_claim: Claim | None = None
        """The worker's next job, when it may go on and one waits."""

    async def run(self) -> bool:
        """Whether the worker may go on with another job."""
        job, token = self._claim.job, self._claim.token
        self._desk.serve(token)
        try:
            try:
                await self._node.send(
                    Work(token=token, job_id=job.id, kind=job.kind, payload=job.payload)
                )
            except FleetError:  # gone before it had the job: that is no try of the job
                return await self._end(lambda: self._queue.give_back(token), alive=False)
            while True:
                message = await self._receive()
                if message is None:
                    return await self._give_up_waiting()
                self._heard_s = self._desk.clock.monotonic()
                if isinstance(message, Done | Failed):
                    return await self._answered(message)
                if not await self._heard(message):
                    return await self._end(lambda: None, alive=False)  # the lease is over
        except WorkerEndedError as error:
            reason, detail, retry = error.reason, error.detail, error.retry
            return await self._end(
                lambda: self._queue.fail(token, reason, detail, retry=retry), alive=False
            )
        except FleetError:
            words = await self._node.last_words()
            detail = f"worker {self._node.name} died; its last words: {words[-500:] or '(none)'}"
            return await self._end(
                lambda: self._queue.fail(token, "lost", detail, retry=True), alive=False
            )
        except asyncio.CancelledError:
            await self._end(lambda: self._queue.give_back(token), alive=False)
            raise

    async def _receive(self) -> FromWorker | None:
        """The next message; None when time is up.

        Past the end there is a short grace to read what waits in the pipe: a controller that was
        busy itself must not blame the worker.
        """
        while True:
            now_s = self._desk.clock.monotonic()
            end_s = min(self._heard_s + self._queue.lease_s, self._deadline_s, self._stage_end_s)
            if now_s < end_s:
                self._grace_end_s = math.inf
            else:
                self._grace_end_s = end_s = min(self._grace_end_s, now_s + _GRACE_S)
                if now_s >= end_s:
                    return None
            with suppress(TimeoutError):
                async with asyncio.timeout(end_s - now_s):
                    # Heartbeats only move the end away; one timer lasts for many of them.
                    while isinstance(message := await self._node.receive(), Beat):
                        if not self._beats(message):
                            return message
                    return message

    async def _give_up_waiting(self) -> bool:
        token, job = self._claim.token, self._claim.job
        now_s = self._desk.clock.monotonic()
        if now_s >= self._deadline_s:
            reason, retry = "timed_out", False
            detail = f"the job took longer than {job.deadline_s:g} s, in stage {self._stage}"
        elif now_s >= self._stage_end_s:
            reason, retry = "timed_out", False
            detail = f"stage {self._stage} took longer than its limit"
        else:
            reason, retry = "lost", True
            detail = f"worker {self._node.name} was silent for {self._queue.lease_s:g} s"
        return await self._end(
            lambda: self._queue.fail(token, reason, detail, retry=retry), alive=False
        )

    async def _heard(self, message: Beat | Stage | Progress | Ready) -> bool:
        """Note a sign of life; False when the lease is over."""
        token = self._claim.token
        if isinstance(message, Ready) or message.token != token:
            return True  # left over from before; harmless
        if isinstance(message, Progress):
            data, job_id = message.data, self._claim.job.id
            await self._desk.writer.run(
                lambda: self._queue.store.events.append("job.progress", job_id, data)
            )
            return True
        if isinstance(message, Stage):
            stage = self._stage = message.name
            self._stage_end_s = self._desk.clock.monotonic() + message.limit_s
            return await self._desk.writer.run(lambda: self._queue.heartbeat(token, stage=stage))
        return self._beats(message)

    def _beats(self, message: Beat) -> bool:
        """Note a heartbeat; False when the lease is over."""
        if message.token != self._claim.token:
            return True  # left over from before; harmless
        self._heard_s = self._desk.clock.monotonic()
        if self._heard_s - self._kept_s < self._queue.lease_s / 3:
            return True  # the lease that is written down still lasts for long
        self._kept_s = self._heard_s
        return self._desk.beat(message.token)

    async def _answered(self, message: Done | Failed) -> bool:
        if isinstance(message, Done):
            return await self._end(
                lambda: self._queue.complete(message.token, message.result), alive=True
            )
        return await self._end(
            lambda: self._queue.fail(
                message.token, message.reason, message.detail, retry=message.retry
            ),
            alive=True,
        )

    async def _end(self, change: Callable[[], object], *, alive: bool) -> bool:
        seconds = self._desk.clock.monotonic() - self._started_s
        self._desk.forget(self._claim.token)
        if alive:
            self.next_claim = await self._desk.end_try_and_claim(
                self._claim, seconds, change, self._node.name
            )
        else:
            await self._desk.end_try(self._claim, seconds, change)
        return alive
