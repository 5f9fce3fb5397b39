"""What trainer and env worker say to each other: JSON frames, strict both ways.

A frame is four length bytes (big endian) and one JSON document. JSON because it has no NaN, no
infinity, no bytes and no foreign types; msgspec in strict mode refuses unknown fields, numbers
that are texts, bools that are floats. Whatever a frame says beyond its schema is checked by
`check_json` (depth, sizes). A side that receives anything else raises `ProtocolError`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, TypeVar

import msgspec

from nestling.jobs.rollout_env import StopReason

__all__ = [
    "MAX_FRAME_BYTES",
    "CallFrame",
    "Fault",
    "FinalFrame",
    "Load",
    "Loaded",
    "ProtocolError",
    "Reply",
    "Request",
    "Reset",
    "RowFrame",
    "Rows",
    "RowsReply",
    "Score",
    "ScoreFrame",
    "ScoreReply",
    "StartFrame",
    "Started",
    "Step",
    "StepReply",
    "Tools",
    "ToolsReply",
    "check_json",
    "decode_reply",
    "decode_request",
    "encode",
    "frame_length",
]

MAX_FRAME_BYTES: Final = 8 * 1024 * 1024
MAX_BATCH: Final = 4096
MAX_DEPTH: Final = 16
"""Nesting of free-form values (arguments, schemas, [env] values)."""
MAX_NODES: Final = 10_000
"""Members of one free-form value, counted over all its levels."""
MAX_ABS_SCORE: Final = 1e9
HEADER_BYTES: Final = 4

T = TypeVar("T")

Id = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Code = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[a-z0-9_.]+$")]
Line = Annotated[str, msgspec.Meta(max_length=4096)]
Text = Annotated[str, msgspec.Meta(max_length=262_144)]
Answer = Annotated[str, msgspec.Meta(max_length=16_384)]
Scores = Annotated[dict[Name, float], msgspec.Meta(max_length=64)]


class ProtocolError(Exception):
    """A frame that no honest peer sends."""


class _Frame(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Unknown fields are an error."""


class Load(_Frame, tag="load"):
    """Import the package with these taskset config values; first request, once."""

    env_args: dict[Name, Any]


class Rows(_Frame, tag="rows"):
    """Rows from `start` on, at most `limit`."""

    start: Count
    limit: Count


class Tools(_Frame, tag="tools"):
    """Tool schemas."""


class Reset(_Frame, tag="reset"):
    """Start rollouts of these rows."""

    rows: Annotated[list[Count], msgspec.Meta(max_length=MAX_BATCH)]


class CallFrame(_Frame):
    """`rollout_env.CallRequest` on the wire."""

    rollout_id: Id
    text: Text
    name: Name
    arguments: dict[str, Any]
    malformed: Line | None
    prompt_tokens: Count
    completion_tokens: Count


class Step(_Frame, tag="step"):
    """Run tool calls."""

    calls: Annotated[list[CallFrame], msgspec.Meta(max_length=MAX_BATCH)]


class FinalFrame(_Frame):
    """`rollout_env.FinalRequest` on the wire."""

    rollout_id: Id
    text: Text
    stop: StopReason
    prompt_tokens: Count
    completion_tokens: Count


class Score(_Frame, tag="score"):
    """End and score rollouts."""

    finals: Annotated[list[FinalFrame], msgspec.Meta(max_length=MAX_BATCH)]


class Loaded(_Frame, tag="loaded"):
    """The package is imported and its taskset exists."""


class RowFrame(_Frame):
    """`rollout_env.Row` on the wire."""

    index: Count
    system_prompt: Text
    prompt: Text
    data_json: Text


class RowsReply(_Frame, tag="rows_reply"):
    """Some rows; `more` when the worker stopped early to keep the frame small."""

    rows: Annotated[list[RowFrame], msgspec.Meta(max_length=MAX_BATCH)]
    more: bool


class ToolsReply(_Frame, tag="tools_reply"):
    """Schemas in OpenAI function form."""

    schemas: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=64)]


class _ToolParameters(msgspec.Struct):
    """Arguments of a tool by name, each with a JSON schema of its own."""

    properties: dict[Name, dict[str, Any]] = {}


class _ToolFunction(msgspec.Struct):
    """The part of a tool schema that is read."""

    name: Name
    parameters: _ToolParameters = msgspec.field(default_factory=_ToolParameters)


class _ToolSchema(msgspec.Struct):
    """A tool as the chat template shows it; other keys may follow."""

    function: _ToolFunction


class StartFrame(_Frame):
    """`rollout_env.RolloutStart` on the wire; the prompt is that of the row."""

    rollout_id: Id
    system_prompt: Text
    prompt: Text


class Started(_Frame, tag="started"):
    """One start per row of the request, in order."""

    starts: Annotated[list[StartFrame], msgspec.Meta(max_length=MAX_BATCH)]


class StepReply(_Frame, tag="step_reply"):
    """One answer per call, in order; null ends the rollout."""

    answers: Annotated[list[Answer | None], msgspec.Meta(max_length=MAX_BATCH)]


class ScoreFrame(_Frame):
    """`rollout_env.ScoreRecord` on the wire."""

    reward: float
    rewards: Scores
    metrics: Scores
    error: Line | None


class ScoreReply(_Frame, tag="score_reply"):
    """One record per final, in order."""

    records: Annotated[list[ScoreFrame], msgspec.Meta(max_length=MAX_BATCH)]


class Fault(_Frame, tag="fault"):
    """The request failed as a whole; the worker is of no more use."""

    code: Code
    detail: Line


Request = Load | Rows | Tools | Reset | Step | Score
Reply = Loaded | RowsReply | ToolsReply | Started | StepReply | ScoreReply | Fault

_ENCODER = msgspec.json.Encoder()
_REQUESTS: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request, strict=True)
_REPLIES: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply, strict=True)


def encode(message: Request | Reply) -> bytes:
    """The frame of a message, header included.

    Raises:
        ProtocolError: the message would be larger than `MAX_FRAME_BYTES` or holds lone surrogates.
    """
    try:
        body = _ENCODER.encode(message)
    except (UnicodeEncodeError, TypeError, RecursionError, msgspec.MsgspecError) as e:
        raise ProtocolError(f"cannot encode {type(message).__name__}: {e}") from e
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"{type(message).__name__} is {len(body)} bytes; at most {MAX_FRAME_BYTES}"
        )
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def frame_length(header: bytes) -> int:
    """Body length said by a header.

    Raises:
        ProtocolError: zero or above the cap.
    """
    length = int.from_bytes(header, "big")
    if not 0 < length <= MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes; expected 1 to {MAX_FRAME_BYTES}")
    return length


def decode_request(body: bytes) -> Request:
    """A request from the trainer.

    Raises:
        ProtocolError: not a request.
    """
    request = _decode(_REQUESTS, body)
    if isinstance(request, Load):
        check_json(request.env_args)
    elif isinstance(request, Step):
        for call in request.calls:
            check_json(call.arguments)
    return request


def decode_reply(body: bytes) -> Reply:
    """A reply from the env worker, which must be expected to lie.

    Raises:
        ProtocolError: not a reply, or a number out of range.
    """
    reply = _decode(_REPLIES, body)
    if isinstance(reply, ToolsReply):
        for schema in reply.schemas:
            check_json(schema)
            _check_schema(schema)
    elif isinstance(reply, ScoreReply):
        for record in reply.records:
            for value in (record.reward, *record.rewards.values(), *record.metrics.values()):
                if not (math.isfinite(value) and abs(value) <= MAX_ABS_SCORE):
                    raise ProtocolError(f"score {value}; expected at most {MAX_ABS_SCORE:g}")
    return reply


def check_json(value: object) -> None:
    """Refuse deep, huge or non-finite free-form JSON values.

    Raises:
        ProtocolError: more than 16 levels, more than 10,000 members, or an odd number.
    """
    seen = 0
    stack: list[tuple[object, int]] = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        seen += 1
        if depth > MAX_DEPTH or seen > MAX_NODES:
            raise ProtocolError(f"a value deeper than {MAX_DEPTH} or larger than {MAX_NODES}")
        if isinstance(item, dict):
            if not all(isinstance(key, str) for key in item):
                raise ProtocolError("an object key that is not a text")
            stack += [(member, depth + 1) for member in item.values()]
        elif isinstance(item, list):
            stack += [(member, depth + 1) for member in item]
        else:
            _check_leaf(item)


def _check_schema(schema: dict[str, Any]) -> None:
    """OpenAI function form as far as anybody here reads it; the rest of it is the author's."""
    try:
        msgspec.convert(schema, _ToolSchema, strict=True)
    except msgspec.ValidationError as e:
        raise ProtocolError(f"a tool schema: {e}"[:400]) from e


def _check_leaf(item: object) -> None:
    if isinstance(item, float):
        if not math.isfinite(item):
            raise ProtocolError(f"the number {item}")
    elif isinstance(item, int) and not isinstance(item, bool):
        if abs(item) >= 2**63:
            raise ProtocolError("a whole number beyond 64 bits")
    elif not (item is None or isinstance(item, str | bool)):
        raise ProtocolError(f"a {type(item).__name__}; expected a JSON value")


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as e:
        raise ProtocolError(f"{type(e).__name__}: {e}"[:400]) from e
