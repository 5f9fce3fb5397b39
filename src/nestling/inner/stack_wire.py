"""Messages between a trainer or scorer and the stack process that holds its model: one connection, one job.

A frame is its length (4 bytes, little-endian) and a msgpack object. Arrays travel as raw little-endian bytes: int32
for ids and counts, float32 for numbers. Both ends are ours; a frame that does not parse ends the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from nestling.engine.learn import LossStats, StepStats

__all__ = [
    "MAX_WEIGHTS_BYTES",
    "Answer",
    "AskRoom",
    "Failed",
    "Finished",
    "FromStack",
    "Join",
    "JoinWeights",
    "Joined",
    "Play",
    "Room",
    "Save",
    "Saved",
    "Supervise",
    "ToStack",
    "Train",
    "Trained",
    "TurnsEnded",
    "WireError",
    "encode",
    "floats",
    "frames",
    "ints",
    "pack_floats",
    "pack_ints",
]

MAX_WEIGHTS_BYTES: Final = 2**32 - 2**16
"""Of `JoinWeights`: what a frame's length can say, less the rest of the message."""
_HEADER: Final = struct.Struct("<I")


class WireError(Exception):
    """The other end sent something that is not of the protocol."""


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Tagged with the class name."""


class AskRoom(_Message, frozen=True):
    """How much room is there for a job on `base`?"""

    base: str
    """Empty: only the fingerprint is wanted."""


class Join(_Message, frozen=True):
    """Train a copy of `base`."""

    base: str
    settings: str
    """JSON of `inner.stack_settings.LearnSettings`."""


class JoinWeights(_Message, frozen=True):
    """Play with given weights in the shape of `base`."""

    base: str
    weights: bytes
    """float32 [P], in the engine's flat order."""


class Play(_Message, frozen=True):
    """Make rollouts; answered by `TurnsEnded` until `Finished`."""

    prompts: bytes
    lengths: bytes
    """Tokens of each prompt."""
    uniforms: bytes
    """float32 [N, max_total_tokens + 1]."""
    temperature: float
    max_turn_tokens: int
    max_total_tokens: int
    max_turns: int


class Answer(_Message, frozen=True):
    """What follows ended turns."""

    rollouts: bytes
    lengths: bytes
    """Tokens of each answer; -1 ends the rollout."""
    ids: bytes


class Train(_Message, frozen=True):
    """One step on the last play."""

    advantages: bytes
    learn_observations: bool
    temperature: float
    lr: float


class Supervise(_Message, frozen=True):
    """One step on given rows, padded to `width` tokens."""

    width: int
    ids: bytes
    lengths: bytes
    ce_weights: bytes
    lr: float


class Save(_Message, frozen=True):
    """Write the trained model."""

    folder: str


class Room(_Message, frozen=True):
    """Answer to `AskRoom`."""

    num_jobs: int
    num_lanes: int
    """Jobs that are decoded at the same time; what the memory has room for, at most what was asked for."""
    asker: int
    """Number of this connection: tells apart those that ask at the same time."""
    process_id: int
    fingerprint: str
    """Changes with whatever may change the numbers: device, precision, sizes."""


class Joined(_Message, frozen=True):
    """The job has its place."""


class TurnsEnded(_Message, frozen=True):
    """Turns that want an answer."""

    rollouts: bytes
    lengths: bytes
    ids: bytes
    truncated: bytes
    """One byte each."""


class Finished(_Message, frozen=True):
    """Every rollout of the play, padded to `width` tokens."""

    width: int
    ids: bytes
    sampled: bytes
    """One byte each."""
    logprobs: bytes
    lengths: bytes
    prompt_lengths: bytes
    turns: bytes
    stops: bytes
    busy_s: float


class Trained(_Message, frozen=True):
    """Statistics of a step."""

    loss: LossStats
    step: StepStats
    busy_s: float
    """Seconds of the device that the job has used so far."""


class Saved(_Message, frozen=True):
    """See `engine.stack_events.Saved`."""

    base_hash: str
    final_hash: str
    delta_norm: float
    is_finite: bool
    busy_s: float


class Failed(_Message, frozen=True):
    """The job is over."""

    reason: str
    detail: str


ToStack = AskRoom | Join | JoinWeights | Play | Answer | Train | Supervise | Save
FromStack = Room | Joined | TurnsEnded | Finished | Trained | Saved | Failed

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToStack | FromStack)


def encode(message: ToStack | FromStack) -> bytes:
    """A whole frame."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


def frames(buffer: bytearray) -> Iterator[ToStack | FromStack]:
    """Take complete frames off the front of a buffer.

    Raises:
        WireError: what is there is no message.
    """
    while len(buffer) >= _HEADER.size:
        (size,) = _HEADER.unpack_from(buffer)
        end = _HEADER.size + size
        if len(buffer) < end:
            return
        body = bytes(memoryview(buffer)[_HEADER.size : end])
        del buffer[:end]
        try:
            yield _decoder.decode(body)
        except msgspec.DecodeError as error:
            raise WireError(f"not a message of the stack: {error}") from error


def pack_ints(array: npt.ArrayLike) -> bytes:
    """int32 bytes."""
    return np.ascontiguousarray(array, "<i4").tobytes()


def ints(data: bytes) -> npt.NDArray[np.int64]:
    """Back from `pack_ints`."""
    try:
        return np.frombuffer(data, "<i4").astype(np.int64)
    except ValueError as error:
        raise WireError(f"{len(data)} bytes are no int32 array") from error


def pack_floats(array: npt.ArrayLike) -> bytes:
    """float32 bytes."""
    return np.ascontiguousarray(array, "<f4").tobytes()


def floats(data: bytes) -> npt.NDArray[np.float32]:
    """Back from `pack_floats`."""
    try:
        return np.frombuffer(data, "<f4").astype(np.float32)
    except ValueError as error:
        raise WireError(f"{len(data)} bytes are no float32 array") from error
