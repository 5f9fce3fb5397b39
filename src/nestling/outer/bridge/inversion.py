"""An episode that asks for its turns, turned into one that is asked to take them.

Our harness is straight-line code that awaits a sampler. A foreign training loop wants the opposite: an
environment that it hands one turn after the other. So the episode runs in a task of its own with a
sampler that only passes requests on; the loop's side waits for the next request, answers it, and learns
at the end what the episode was paid. Plain asyncio, no vendor.

An episode ends exactly once, and whoever began it must `close` it, whatever happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from nestling.core.errors import LearnerError
from nestling.outer.learner import Sampled

__all__ = ["BridgeSampler", "InvertedEpisode", "TurnWanted"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnWanted:
    """The episode needs a turn."""

    ids: tuple[int, ...]
    """All tokens so far; each request's begin with those of the one before and its answer."""
    max_tokens: int


class BridgeSampler:
    """What the episode sees: a `TokenSampler` that waits for somebody else to sample.

    One request at a time; a second one while the first waits is refused.
    """

    def __init__(self) -> None:
        self._request: TurnWanted | None = None
        self._asked = asyncio.Event()
        self._waiting: asyncio.Future[Sampled] | None = None
        self._closed = False

    async def sample(
        self,
        ids: Sequence[int],
        *,
        session: str,  # noqa: ARG002 (one sampler has one session)
        seed: int,  # noqa: ARG002 (whoever samples has randomness of its own)
        max_tokens: int,
        temperature: float,  # noqa: ARG002 (the loop's own setting)
    ) -> Sampled:
        """Wait for the turn; see `TokenSampler.sample`."""
        if self._closed:
            raise LearnerError("the episode was closed; no turn can be sampled any more")
        if self._waiting is not None:
            raise LearnerError("a turn is being sampled already; expected one at a time")
        self._waiting = asyncio.get_running_loop().create_future()
        self._request = TurnWanted(ids=tuple(ids), max_tokens=max_tokens)
        self._asked.set()
        try:
            return await self._waiting
        finally:
            self._waiting = self._request = None
            self._asked.clear()

    async def wanted(self) -> TurnWanted:
        """The request that waits for an answer; the same one until it is answered."""
        while self._request is None:  # it may be withdrawn before this task runs again
            await self._asked.wait()
        return self._request

    def answer(self, turn: Sampled) -> bool:
        """Give the episode its turn; False when it does not wait for one (any more)."""
        if self._waiting is None or self._waiting.done():
            return False
        self._waiting.set_result(turn)
        self._request = None
        self._asked.clear()
        return True

    def close(self) -> None:
        """Let go whoever still waits: a task that the episode left behind, for example."""
        self._closed = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.cancel()


class InvertedEpisode(Generic[R]):
    """A running episode; use from one event loop.

    `play` gets the sampler and returns the result; `timeout_s` bounds it as a whole, the time that the
    loop takes to answer included.
    """

    def __init__(
        self,
        play: Callable[[BridgeSampler], Awaitable[R]],
        *,
        name: str,
        timeout_s: float | None = None,
    ) -> None:
        self._sampler = BridgeSampler()
        self._task = asyncio.get_running_loop().create_task(
            self._run(play, timeout_s), name=f"episode-{name}"
        )

    @property
    def is_done(self) -> bool:
        """The episode has ended, one way or the other."""
        return self._task.done()

    async def next_request(self) -> TurnWanted | None:
        """The turn that is wanted; None once the episode has returned.

        Raises whatever the episode raised, `TimeoutError` when it took too long. Cancelling this call
        leaves the episode as it is.
        """
        asking = asyncio.get_running_loop().create_task(self._sampler.wanted())
        try:
            await asyncio.wait({asking, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not self._task.done():
                return asking.result()
            if self._task.cancelled():
                raise LearnerError("the episode was cancelled, or something that it waited for was")
            self._task.result()
            return None
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait({asking})

    def answer(self, turn: Sampled) -> bool:
        """The turn that was wanted; False when the episode has withdrawn its request.

        It may have ended, or been cancelled in part, while the turn was sampled: `next_request` tells.
        """
        return self._sampler.answer(turn)

    def result(self) -> R:
        """What the episode returned; only after `next_request` gave None."""
        return self._task.result()

    def cancel(self) -> None:
        """Ask the episode to end; `close` waits for it."""
        self._task.cancel()

    async def close(self) -> None:
        """End the episode if it still runs and wait until it has cleaned up; may be called twice."""
        self.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # seen here at the latest, so that nobody is warned of it

    async def _run(
        self, play: Callable[[BridgeSampler], Awaitable[R]], timeout_s: float | None
    ) -> R:
        try:
            async with asyncio.timeout(timeout_s):
                return await play(self._sampler)
        finally:
            self._sampler.close()
