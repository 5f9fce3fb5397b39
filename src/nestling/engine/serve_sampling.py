"""Requests of many clients decoded together on one thread.

All waiting requests of one temperature are decoded a few tokens at a time; whoever comes meanwhile joins
at the next stop, whoever is done leaves. A slot keeps its cache after a request, and the next prompt that
starts with what the slot holds feeds only the rest: a conversation costs its new tokens. Tokens depend on
prompt and seed alone, not on neighbours.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nestling.core.errors import ModelError, NestlingError
from nestling.engine.decoder import row_uniforms
from nestling.engine.model import Model
from nestling.engine.turn_sampler import SamplingParams, TurnSampler

__all__ = ["BusyError", "Piece", "SamplingRequest", "SamplingThread"]

_CHUNK_TOKENS = 16
"""Tokens decoded before others may join."""


class BusyError(NestlingError):
    """Too many requests wait already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some sampled tokens of one request."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Of the sampling distribution, one per id."""
    stop: str | None = None
    """`stop`: the model ended its turn, `length`: it was cut, `error`: it died; None: more comes."""
    error: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class SamplingRequest:
    """One turn to sample; `tell` is called on the sampling thread with each piece."""

    ids: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float
    tell: Callable[[Piece], None]
    cancelled: bool = False
    """Set it to give up; the slot is free at the next stop."""
    slot: int = field(default=-1, init=False)
    num_sampled: int = field(default=0, init=False)


class SamplingThread:
    """Owns the model: nothing else may use it while the thread lives; `close` ends it."""

    def __init__(self, model: Model, *, num_slots: int, max_len: int, max_waiting: int) -> None:
        self.max_len = max_len
        """Tokens of a whole conversation, the sampled turn included."""
        self._slots = _Slots(model, num_slots, max_len)
        self._inbox: queue.SimpleQueue[SamplingRequest | None] = queue.SimpleQueue()
        self._max_waiting = max_waiting
        self._num_open = 0
        self._lock = threading.Lock()  # protects _num_open, _is_closing and the order of the inbox
        self._live: list[SamplingRequest] = []
        self._waiting: list[SamplingRequest] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)
        self._thread.start()

    def submit(self, request: SamplingRequest) -> None:
        """Queue a request; raises `BusyError` when too many are open, `ModelError` when it cannot fit."""
        if not 0 < len(request.ids) < self.max_len:
            raise ModelError(
                f"a prompt of {len(request.ids)} tokens; expected 1 to {self.max_len - 1}"
            )
        with self._lock:
            if self._is_closing:
                raise BusyError("the server is stopping")
            if self._num_open >= self._max_waiting:
                raise BusyError(f"{self._num_open} requests are open; try again later")
            self._num_open += 1
            self._inbox.put(request)  # under the lock, so that nothing follows the end mark

    def close(self) -> None:
        """End the thread; open requests get an error. May be called twice."""
        with self._lock:
            self._is_closing = True
            self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_in():
                batch = self._next_batch()
                if batch:
                    self._decode(batch)
        finally:  # a bug must not leave clients waiting
            self._end()

    def _end(self) -> None:
        """Answer everybody who still waits."""
        with self._lock:
            self._is_closing = True
            while not self._inbox.empty():
                one = self._inbox.get()
                if one is not None:
                    self._waiting.append(one)
        for request in [*self._live, *self._waiting]:
            self._finish(request, Piece(stop="error", error="the server is stopping"))

    def _take_in(self) -> bool:
        """Move what arrived to the waiting list, blocking when idle; False to end."""
        is_idle = not self._live and not self._waiting
        try:
            while True:
                one = self._inbox.get(block=is_idle)
                if one is None:
                    return False
                self._waiting.append(one)
                is_idle = False
        except queue.Empty:
            return True

    def _next_batch(self) -> list[SamplingRequest]:
        """Give slots to those that wait, then those of the temperature whose turn it is."""
        for request in [one for one in (*self._live, *self._waiting) if one.cancelled]:
            self._finish(request, Piece(stop="error", error="cancelled"))
        while self._waiting and self._slots.has_room:
            request = self._waiting.pop(0)
            request.slot = self._slots.take(request.ids, request.seed)
            self._live.append(request)
        if not self._live:
            return []
        first = self._live[0].temperature
        return [one for one in self._live if one.temperature == first]

    def _decode(self, batch: list[SamplingRequest]) -> None:
        num_tokens = min(_CHUNK_TOKENS, *(one.max_tokens - one.num_sampled for one in batch))
        params = SamplingParams(
            temperature=batch[0].temperature,
            max_turn_tokens=num_tokens,
            max_total_tokens=self.max_len,
        )
        try:
            turns = self._slots.sample([one.slot for one in batch], params)
        except (NestlingError, RuntimeError, MemoryError) as error:
            for request in batch:
                self._finish(request, Piece(stop="error", error=f"sampling failed: {error}"))
            return
        for request, turn in zip(batch, turns, strict=True):
            request.num_sampled += len(turn.ids)
            length = len(request.ids) + request.num_sampled
            is_full = request.num_sampled >= request.max_tokens or length >= self.max_len
            stop = "stop" if not turn.truncated else "length" if is_full else None
            piece = Piece(ids=tuple(turn.ids), logprobs=tuple(turn.logprobs), stop=stop)
            if stop is None:
                request.tell(piece)
                # Behind the others, so that another temperature has its turn.
                self._live.remove(request)
                self._live.append(request)
            else:
                self._finish(request, piece)

    def _finish(self, request: SamplingRequest, last: Piece) -> None:
        if request in self._live:
            self._live.remove(request)
            self._slots.give_back(request.slot)
        else:
            self._waiting.remove(request)
        with self._lock:
            self._num_open -= 1
        request.tell(last)


class _Slots(TurnSampler):
    """Sessions in use, and those that wait for the rest of their conversation, oldest first."""

    def __init__(self, model: Model, slots: int, max_len: int) -> None:
        super().__init__(model, slots, max_len)
        self._idle: list[int] = []

    @property
    def has_room(self) -> bool:
        """A slot is free, or held by nobody who is being served."""
        return bool(self._free or self._idle)

    def take(self, ids: Sequence[int], seed: int) -> int:
        """A slot that holds `ids`, with as much of its cache as fits."""
        slot = self._longest_start(ids)
        if slot is not None:
            self._idle.remove(slot)
            self.feed(slot, ids[len(self._session(slot).ids) :])
            self._session(slot).uniforms = row_uniforms(seed, self._max_len + 1)
            return slot
        if not self._free:
            self.close(self._idle.pop(0))
        return self.open(ids, seed)

    def give_back(self, slot: int) -> None:
        """Keep the session until its slot is needed."""
        self._idle.append(slot)

    def _longest_start(self, ids: Sequence[int]) -> int | None:
        """The idle slot whose whole content begins `ids`."""
        found, most = None, 0
        for slot in self._idle:
            held = self._session(slot).ids
            if most < len(held) <= len(ids) and list(ids[: len(held)]) == held:
                found, most = slot, len(held)
        return found
