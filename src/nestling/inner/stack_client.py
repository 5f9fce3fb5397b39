"""A trainer's or scorer's end of the stack: its model lives in another process.

Joining may wait, for room. While the device computes, the caller's own work (tools, scoring) goes on in its process.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import psutil

from nestling.core.errors import ConfigError, JobFailedError, LearnerError
from nestling.engine.decoder import row_uniforms
from nestling.engine.learn import LossStats, StepStats, TrainRow
from nestling.engine.sampler import Respond, Rollout, SamplingParams, TurnEnd
from nestling.engine.stack_play import STOPS
from nestling.engine.tokenizer import Tokenizer
from nestling.inner import stack_wire as wire
from nestling.inner.stack_settings import LearnSettings

__all__ = ["StackJob", "Stacks", "place"]

_LOOK_S: Final = 1.0
"""Between two looks at the deadline while waiting."""
_READ_BYTES: Final = 2**20
_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """The stack processes of this machine, by the paths of their sockets."""

    sockets: tuple[str, ...]

    def join(self, base: str, settings: LearnSettings, check: Callable[[], None]) -> StackJob:
        """A job that trains a copy of `base`, on the device with the smallest share of its lanes taken.

        `check` is called while waiting, here and in all that follows; what it raises ends the wait.

        Raises:
            JobFailedError: the job does not fit any device (`stack.out_of_memory`).
            LearnerError: no stack process answers; the job may be tried again.
        """
        return self._joined(wire.Join(base=base, settings=settings.model_dump_json()), check)

    def join_weights(
        self, base: str, flat: npt.NDArray[np.float32], check: Callable[[], None]
    ) -> StackJob:
        """A job that plays with weights of its own, float32 in the engine's flat order.

        Raises:
            ConfigError: more weights than one message holds.
        """
        if flat.nbytes >= wire.MAX_WEIGHTS_BYTES:
            raise ConfigError(
                f"the weights of {base} are {flat.nbytes} bytes; expected fewer than "
                f"{wire.MAX_WEIGHTS_BYTES} for a model that is scored in a stack; "
                'set inner.trainer = "embedded" for it'
            )
        return self._joined(wire.JoinWeights(base=base, weights=wire.pack_floats(flat)), check)

    def fingerprint(self, check: Callable[[], None]) -> str:
        """Changes with whatever may change the numbers of any of the devices; `check` as in `join`."""
        found = []
        for path in self.sockets:
            job = StackJob(path, check)
            try:
                found.append(job.room("").fingerprint)
            finally:
                job.close()
        return "; ".join(sorted(set(found)))

    def _joined(self, message: wire.Join | wire.JoinWeights, check: Callable[[], None]) -> StackJob:
        job = self._best(message.base, check)
        try:
            job.join(message)
        except BaseException:
            job.close()  # or it waits on, and takes a place that nobody uses
            raise
        return job

    def _best(self, base: str, check: Callable[[], None]) -> StackJob:
        """A connection to the device whose lanes are taken least; equal ones in turn.

        Devices that do not answer, for example while their process is started again, are passed over. Lanes
        are what a device's memory has room for. Jobs that start together all see empty devices, so the number
        of their connection decides between equals.
        """
        opened, answered, away = list[StackJob](), list[StackJob](), list[LearnerError]()
        rooms = list[wire.Room]()
        chosen: StackJob | None = None
        try:
            for path in self.sockets:
                try:
                    opened.append(StackJob(path, check))
                    rooms.append(opened[-1].room(base))
                    answered.append(opened[-1])
                except LearnerError as error:
                    away.append(error)
            if not answered:
                raise away[0]
            chosen = answered[place(rooms)]
        finally:
            for job in opened:
                if job is not chosen:
                    job.close()
        return chosen


def place(rooms: Sequence[wire.Room]) -> int:
    """Index of the device for a job."""
    taken = [room.num_jobs / room.num_lanes for room in rooms]
    least = [i for i, share in enumerate(taken) if share == min(taken)]
    return least[rooms[0].asker % len(least)]


class StackJob:
    """One job in a stack; close it to leave."""

    def __init__(self, path: str, check: Callable[[], None]) -> None:
        self._check = check
        self._received = bytearray()
        self._messages: list[wire.ToStack | wire.FromStack] = []
        self._busy_s = 0.0
        self._is_below_us = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(_LOOK_S)
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise LearnerError(
                f"the stack process at {path} cannot be reached: {error.strerror or error}; "
                "expected it to run beside the workers; its log says why it ended"
            ) from error

    @property
    def busy_s(self) -> float:
        """Seconds of the device that this job has used so far; 0 of a process below this one.

        What descends from this process is counted by `inner.cpu_time` already.
        """
        return 0.0 if self._is_below_us else self._busy_s

    def room(self, base: str) -> wire.Room:
        """How much room the device has for a job on `base`."""
        self._send(wire.AskRoom(base=base))
        room = self._receive(wire.Room)
        with contextlib.suppress(psutil.NoSuchProcess):
            above = psutil.Process(room.process_id).parents()
            self._is_below_us = os.getpid() in [process.pid for process in above]
        return room

    def join(self, message: wire.Join | wire.JoinWeights) -> None:
        """Wait for a place."""
        self._send(message)
        self._receive(wire.Joined)

    def play(
        self,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        params: SamplingParams,
        respond: Respond,
    ) -> list[Rollout]:
        """As `engine.sampler.play`; `respond` gets the turns that have ended since it was last called."""
        length = params.max_total_tokens + 1
        lengths = [len(prompt) for prompt in prompts]
        flat = np.fromiter((i for prompt in prompts for i in prompt), np.int64, sum(lengths))
        self._send(
            wire.Play(
                prompts=wire.pack_ints(flat),
                lengths=wire.pack_ints(lengths),
                uniforms=wire.pack_floats([row_uniforms(seed, length) for seed in seeds]),
                temperature=params.temperature,
                max_turn_tokens=params.max_turn_tokens,
                max_total_tokens=params.max_total_tokens,
                max_turns=params.max_turns,
            )
        )
        while True:
            message = self._next()
            if isinstance(message, wire.Finished):
                self._busy_s = message.busy_s
                return _rollouts(message)
            if not isinstance(message, wire.TurnsEnded):
                raise _unexpected(message)
            ends = _turn_ends(message, tokenizer)
            self._send(_answer([end.row for end in ends], respond(ends)))

    def train(
        self,
        advantages: Sequence[float],
        *,
        learn_observations: bool,
        temperature: float,
        lr: float,
    ) -> tuple[LossStats, StepStats]:
        """One step on the rollouts of the last play."""
        self._send(
            wire.Train(
                advantages=wire.pack_floats(advantages),
                learn_observations=learn_observations,
                temperature=temperature,
                lr=lr,
            )
        )
        reply = self._receive(wire.Trained)
        self._busy_s = reply.busy_s
        return reply.loss, reply.step

    def supervise(self, rows: Sequence[TrainRow], lr: float) -> tuple[LossStats, StepStats]:
        """One step on rows with cross-entropy weights."""
        lengths = [len(row.ids) for row in rows]
        ids = np.zeros((len(rows), max(lengths)), np.int64)
        weights = np.zeros(ids.shape, np.float32)
        for n, row in enumerate(rows):
            ids[n, : lengths[n]], weights[n, : lengths[n]] = row.ids, row.ce_weights
        self._send(
            wire.Supervise(
                width=ids.shape[1],
                ids=wire.pack_ints(ids),
                lengths=wire.pack_ints(lengths),
                ce_weights=wire.pack_floats(weights),
                lr=lr,
            )
        )
        reply = self._receive(wire.Trained)
        self._busy_s = reply.busy_s
        return reply.loss, reply.step

    def save(self, folder: str) -> wire.Saved:
        """Have the trained model written.

        Raises:
            JobFailedError: `stack.disk`, it cannot be, for example on a full disk.
        """
        self._send(wire.Save(folder=folder))
        try:
            reply = self._receive(wire.Saved)
        except JobFailedError as error:
            if error.reason != "stack.disk" or folder in error.detail:
                raise
            raise JobFailedError(
                error.reason, f"{folder}: {error.detail}; free some room"
            ) from error
        self._busy_s = reply.busy_s
        return reply

    def close(self) -> None:
        """Leave the stack; may be called twice."""
        self._socket.close()

    def _send(self, message: wire.ToStack) -> None:
        data = memoryview(wire.encode(message))
        while data:
            try:
                data = data[self._socket.send(data) :]
            except TimeoutError:
                self._check()
            except OSError as error:
                raise self._lost() from error

    def _receive(self, kind: type[_Message]) -> _Message:
        message = self._next()
        if not isinstance(message, kind):
            raise _unexpected(message)
        return message

    def _next(self) -> wire.ToStack | wire.FromStack:
        """The next message; a `Failed` is raised."""
        while not self._messages:
            self._check()
            try:
                data = self._socket.recv(_READ_BYTES)
            except TimeoutError:
                continue
            except OSError as error:
                raise self._lost() from error
            if not data:
                raise self._lost()
            self._received += data
            try:
                self._messages += wire.frames(self._received)
            except wire.WireError as error:
                raise LearnerError(f"the stack process sent nonsense: {error}") from error
        message = self._messages.pop(0)
        if isinstance(message, wire.Failed):
            if message.reason == "stack.config":
                raise ConfigError(message.detail)
            raise JobFailedError(message.reason, message.detail)
        return message

    def _lost(self) -> LearnerError:
        return LearnerError(
            "the stack process ended while it owed an answer; expected it to outlive its jobs; "
            "its log says why, and the job may be tried again"
        )


def _unexpected(message: object) -> LearnerError:
    return LearnerError(f"the stack process answered with {type(message).__name__}")


def _turn_ends(message: wire.TurnsEnded, tokenizer: Tokenizer) -> list[TurnEnd]:
    found, at = [], 0
    ids = wire.ints(message.ids).tolist()
    rows, lengths = wire.ints(message.rollouts).tolist(), wire.ints(message.lengths).tolist()
    for row, size, truncated in zip(rows, lengths, message.truncated, strict=True):
        turn = ids[at : at + size]
        at += size
        text = tokenizer.decode(turn if truncated else turn[:-1])
        found.append(TurnEnd(row=row, ids=turn, text=text, truncated=bool(truncated)))
    return found


def _answer(rows: Sequence[int], answers: Sequence[list[int] | None]) -> wire.Answer:
    if len(answers) != len(rows):
        raise ConfigError(f"respond gave {len(answers)} answers to {len(rows)} turns")
    return wire.Answer(
        rollouts=wire.pack_ints(rows),
        lengths=wire.pack_ints([-1 if one is None else len(one) for one in answers]),
        ids=wire.pack_ints([token for one in answers if one for token in one]),
    )


def _rollouts(message: wire.Finished) -> list[Rollout]:
    lengths = wire.ints(message.lengths).tolist()
    shape = (len(lengths), message.width)
    ids = wire.ints(message.ids).reshape(shape)
    sampled = np.frombuffer(message.sampled, bool).reshape(shape)
    logp = wire.floats(message.logprobs).reshape(shape)
    starts, turns = wire.ints(message.prompt_lengths).tolist(), wire.ints(message.turns).tolist()
    return [
        Rollout(
            ids=ids[n, :length].tolist(),
            sampled=sampled[n, :length].tolist(),
            logprobs=logp[n, :length].tolist(),
            prompt_len=starts[n],
            num_turns=turns[n],
            stop=STOPS[stop],
        )
        for n, (length, stop) in enumerate(
            zip(lengths, wire.ints(message.stops).tolist(), strict=True)
        )
    ]
