"""Turns of many concurrent sessions become batches on one worker thread.

Requests that arrive while the thread is busy, or within a short window of each other, are decoded
together, a few tokens at a time: whoever is done is answered, whoever came meanwhile joins, so that one
turn without end delays nobody. A session keeps its cache between turns: a prompt that extends what its slot already holds
feeds only the new tokens. Slots are shared by recency; a session that lost its slot is prefilled
again. Tokens depend on ids and seed, not on neighbours or arrival; in the last bits of log-
probabilities the shape of a batch may show. `lockstep` removes that too: every turn alone, from an
empty cache, so that a turn is bit for bit a function of its request.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace

from nestling.core.errors import LearnerError, NestlingError
from nestling.engine.decoder import row_uniforms
from nestling.engine.model import Model
from nestling.engine.turn_sampler import SamplingParams, TurnSampler
from nestling.outer.learner import Sampled

__all__ = ["PublishedPolicy", "TurnBatcher", "TurnRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One turn to sample."""

    ids: tuple[int, ...]
    session: str
    seed: int
    max_tokens: int
    temperature: float


class PublishedPolicy:
    """Immutable weights with the caches of the sessions that sample them; one thread at a time.

    Memory for caches is taken at the first turn: `num_slots` sessions of `max_len` tokens.
    """

    def __init__(self, model: Model, *, version: int, num_slots: int, max_len: int) -> None:
        self._model = model
        self._version = version
        self._num_slots = num_slots
        self._max_len = max_len
        self._sampler: _SeededTurnSampler | None = None
        self._slots: OrderedDict[str, _Slot] = OrderedDict()

    @property
    def version(self) -> int:
        """Updates in these weights."""
        return self._version

    @property
    def model(self) -> Model:
        """The weights; not to be changed."""
        return self._model

    @property
    def num_slots(self) -> int:
        """Sessions that can be decoded together."""
        return self._num_slots

    @property
    def max_len(self) -> int:
        """Tokens a session may have."""
        return self._max_len

    def sample(
        self, requests: Sequence[TurnRequest], num_tokens: int, *, keep_cache: bool = True
    ) -> list[Sampled]:
        """Up to `num_tokens` of each turn; requests differ in session and agree in temperature.

        Blocks. Every prompt must be shorter than `max_len`.
        """
        if self._sampler is None:
            self._sampler = _SeededTurnSampler(self._model, self._num_slots, self._max_len)
        params = SamplingParams(
            temperature=requests[0].temperature,
            max_turn_tokens=num_tokens,
            max_total_tokens=self._max_len,
        )
        slots = self._ready_slots(self._sampler, requests)
        turns = self._sampler.sample([slot.index for slot in slots], params)
        answers = []
        for slot, turn in zip(slots, turns, strict=True):
            slot.ids += turn.ids
            answers.append(
                Sampled(ids=turn.ids, logprobs=turn.logprobs, stopped=not turn.truncated)
            )
        if not keep_cache:
            for request in requests:
                self._sampler.close(self._slots.pop(request.session).index)
        return answers

    def _ready_slots(
        self, sampler: _SeededTurnSampler, requests: Sequence[TurnRequest]
    ) -> list[_Slot]:
        """A slot per request, holding exactly its ids and its seed."""
        for request in requests:
            if request.session in self._slots:
                self._slots.move_to_end(request.session)
        ready = []
        for request in requests:
            slot = self._slots.get(request.session)
            if slot is not None and request.ids[: len(slot.ids)] != tuple(slot.ids):
                sampler.close(self._slots.pop(request.session).index)
                slot = None
            if slot is None:
                if len(self._slots) >= self._num_slots:
                    _, oldest = self._slots.popitem(last=False)
                    sampler.close(oldest.index)
                slot = _Slot(index=sampler.open(request.ids, request.seed), ids=[])
                self._slots[request.session] = slot
            else:
                sampler.feed(slot.index, request.ids[len(slot.ids) :])
                sampler.reseed(slot.index, request.seed)
            slot.ids = list(request.ids)
            ready.append(slot)
        return ready


@dataclass(slots=True, kw_only=True)
class _Slot:
    index: int
    ids: list[int]


class _SeededTurnSampler(TurnSampler):
    """Every turn has a seed of its own, so that it can be sampled again without those before it."""

    def reseed(self, slot: int, seed: int) -> None:
        """Random numbers of the session's next turns."""
        self._session(slot).uniforms = row_uniforms(seed, self._max_len + 1)


_CHUNK_TOKENS = 32
"""Tokens decoded before others may join: about one turn of the embedded agent."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiting:
    policy: PublishedPolicy
    request: TurnRequest
    answer: asyncio.Future[Sampled]
    ids: list[int] = field(default_factory=list)
    """Sampled so far."""
    logprobs: list[float] = field(default_factory=list)

    def rest(self) -> TurnRequest:
        """What is still to be sampled; random numbers go by position, so the seed stays."""
        request = self.request
        return replace(
            request,
            ids=(*request.ids, *self.ids),
            max_tokens=request.max_tokens - len(self.ids),
        )

    def add(self, part: Sampled) -> bool:
        """Take in the next tokens; whether the turn is over, and then the answer is given."""
        self.ids += part.ids
        self.logprobs += part.logprobs
        length = len(self.request.ids) + len(self.ids)
        is_full = len(self.ids) >= self.request.max_tokens or length >= self.policy.max_len
        if not part.stopped and not is_full:
            return False
        if not self.answer.done():
            self.answer.set_result(
                Sampled(ids=self.ids, logprobs=self.logprobs, stopped=part.stopped)
            )
        return True


class TurnBatcher:
    """Collects requests on the event loop and runs them in batches on a one-thread executor.

    Used from one event loop. A cancelled request that already runs finishes unheard.
    """

    def __init__(self, executor: Executor, *, window_s: float, lockstep: bool) -> None:
        self._executor = executor
        self._window_s = window_s
        self._lockstep = lockstep
        self._waiting: list[_Waiting] = []
        self._is_busy = False

    async def sample(self, policy: PublishedPolicy, request: TurnRequest) -> Sampled:
        """One turn; raises `LearnerError`."""
        _check(policy, request)  # here, so that a wrong request fails alone
        loop = asyncio.get_running_loop()
        waiting = _Waiting(policy=policy, request=request, answer=loop.create_future())
        self._waiting.append(waiting)
        self._schedule(loop)
        return await waiting.answer

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._is_busy or not self._waiting:
            return
        self._is_busy = True
        is_under_way = self._lockstep or any(one.ids for one in self._waiting)
        loop.call_later(0.0 if is_under_way else self._window_s, self._dispatch, loop)

    def _dispatch(self, loop: asyncio.AbstractEventLoop) -> None:
        batch = self._choose()
        if not batch:
            self._is_busy = False
            return
        rests = [one.rest() for one in batch]
        num_tokens = min(rest.max_tokens for rest in rests)
        if not self._lockstep:
            num_tokens = min(num_tokens, _CHUNK_TOKENS)
        try:
            running = self._executor.submit(
                batch[0].policy.sample, rests, num_tokens, keep_cache=not self._lockstep
            )
        except RuntimeError as error:  # the executor was shut down
            for one in batch:
                one.answer.set_exception(LearnerError(f"the learner is closed: {error}"))
            self._is_busy = False
            self._schedule(loop)
            return

        def tell(done: Future[list[Sampled]]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._finish, loop, batch, done)

        running.add_done_callback(tell)

    def _choose(self) -> list[_Waiting]:
        """The oldest request and all others that can be decoded with it."""
        self._waiting = [one for one in self._waiting if not one.answer.done()]
        batch: list[_Waiting] = []
        sessions: set[str] = set()
        for one in self._waiting:
            if batch and not _fit_together(batch[0], one):
                continue
            if one.request.session in sessions:
                continue
            batch.append(one)
            sessions.add(one.request.session)
            if self._lockstep or len(batch) >= one.policy.num_slots:
                break
        self._waiting = [one for one in self._waiting if one not in batch]
        return batch

    def _finish(
        self, loop: asyncio.AbstractEventLoop, batch: list[_Waiting], done: Future[list[Sampled]]
    ) -> None:
        self._is_busy = False
        error = LearnerError("the learner was closed") if done.cancelled() else done.exception()
        if error is None:
            parts = zip(batch, done.result(), strict=True)
            unfinished = [one for one, part in parts if not one.add(part)]
            self._waiting = unfinished + self._waiting
        for one in batch:
            if error is None or one.answer.done():
                continue
            if isinstance(error, NestlingError | RuntimeError | MemoryError):
                # One exception object must not be raised by several tasks.
                one.answer.set_exception(LearnerError(f"sampling failed: {error}"))
            else:
                one.answer.set_exception(error)
        self._schedule(loop)


def _check(policy: PublishedPolicy, request: TurnRequest) -> None:
    if not 0 < len(request.ids) < policy.max_len:
        raise LearnerError(
            f"a prompt of {len(request.ids)} tokens; expected 1 to {policy.max_len - 1}; "
            f"raise max_total_tokens or end the episode earlier"
        )
    if request.max_tokens < 1 or not 0 <= request.temperature <= 100:
        raise LearnerError(
            f"max_tokens={request.max_tokens} and temperature={request.temperature}; "
            f"expected at least 1 and 0 to 100"
        )


def _fit_together(first: _Waiting, other: _Waiting) -> bool:
    return first.policy is other.policy and first.request.temperature == other.request.temperature
