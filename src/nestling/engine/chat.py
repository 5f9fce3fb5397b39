"""The one tool dialect, Hermes calls, in the turns of the model's own chat layout.

A conversation is built from trusted glue and untrusted content, encoded apart, so that content can
never open or close a turn. History is appended as ids, never rendered again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from nestling.engine.tokenizer import Tokenizer

__all__ = [
    "FinalAnswer",
    "MalformedCall",
    "Message",
    "ParsedTurn",
    "Role",
    "ToolCall",
    "parse_turn",
    "prompt_ids",
    "render_call",
    "tool_result_ids",
]

Role = Literal["system", "user", "assistant", "tool"]

MAX_CALL_CHARS: Final = 65536
MAX_CALL_DEPTH: Final = 16
MAX_NAME_CHARS: Final = 128

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_RESULT_OPEN: Final = "<tool_response>\n"
_RESULT_CLOSE: Final = "\n</tool_response>"
_BLANKS: Final = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation; a tool message is what a tool answered."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A turn that asks for exactly one tool."""

    name: str
    arguments: dict[str, Any]
    text_before: str = ""
    """What the model said before the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalAnswer:
    """A turn without a call."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """A turn that starts a call but is not exactly one well-formed call."""

    reason: str


ParsedTurn = ToolCall | FinalAnswer | MalformedCall


def prompt_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tool_schemas: Sequence[dict[str, Any]] | None = None,
) -> list[int]:
    """Ids of a conversation up to and including the header of the next assistant turn.

    `tool_schemas` (OpenAI function form) go into the system turn as Qwen and Hermes models expect;
    tiny models are given none. Where the layout has no system turn, all of this opens the first turn of
    the user. Ids of a history equal those a rollout builds by appending.

    Raises:
        ValueError: no messages, or a system message that is not the first.
    """
    if not messages:
        raise ValueError("a prompt needs at least one message")
    if any(message.role == "system" for message in messages[1:]):
        raise ValueError("a system message must be the first message")
    layout = tokenizer.layout
    rest = list(messages)
    system = rest.pop(0).content if rest[0].role == "system" else ""
    system += _tools_section(system, tool_schemas)
    ids: list[int] = []
    glue = layout.opening
    if not layout.has_system:
        rest = _joined(system, rest)
    elif system or messages[0].role == "system":
        ids += tokenizer.encode_markup(glue + layout.header("system"))
        ids += tokenizer.encode(system)
        glue = f"{layout.turn_end}\n"
    for message in rest:
        is_tool = message.role == "tool"
        header = layout.header("user" if is_tool else message.role)
        ids += tokenizer.encode_markup(glue + header + (_RESULT_OPEN if is_tool else ""))
        ids += tokenizer.encode(message.content)
        if message.role == "assistant":
            ids.append(tokenizer.turn_end_id)  # sampled alone, so it never joins the glue after it
            glue = "\n"
        else:
            glue = (_RESULT_CLOSE if is_tool else "") + f"{layout.turn_end}\n"
    return ids + tokenizer.encode_markup(glue + layout.header("assistant"))


def tool_result_ids(tokenizer: Tokenizer, content: str) -> list[int]:
    """What follows a sampled end of turn: the tool's answer and the next assistant header."""
    layout = tokenizer.layout
    after = f"{_RESULT_CLOSE}{layout.turn_end}\n{layout.header('assistant')}"
    return [
        *tokenizer.encode_markup(f"\n{layout.header('user')}{_RESULT_OPEN}"),
        *tokenizer.encode(content),
        *tokenizer.encode_markup(after),
    ]


def render_call(name: str, arguments: dict[str, Any]) -> str:
    """A call as the model must write it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{_OPEN}\n{body}\n{_CLOSE}"


def parse_turn(text: str) -> ParsedTurn:
    """What a turn asks for. Total: any text gives one of the three results.

    A call is optional text, `<tool_call>`, one JSON object with exactly `name` (string) and
    `arguments` (object), `</tool_call>`, and then only blanks. `text` is without its end token.
    """
    before, marker, after = text.partition(_OPEN)
    if not marker:
        return FinalAnswer(text=text)
    if len(after) > MAX_CALL_CHARS:
        return MalformedCall(reason=f"the call is longer than {MAX_CALL_CHARS} characters")
    body = after.lstrip(_BLANKS)
    try:
        call, end = _DECODER.raw_decode(body)
    except (ValueError, RecursionError) as e:
        return MalformedCall(reason=f"the call is not valid JSON: {_short(e)}")
    if body[end:].strip(_BLANKS) != _CLOSE:
        return MalformedCall(
            reason=f"expected one {_CLOSE} right after the JSON object and nothing more"
        )
    problem = _call_problem(call)
    if problem:
        return MalformedCall(reason=problem)
    return ToolCall(name=call["name"], arguments=call["arguments"], text_before=before)


def _joined(system: str, rest: list[Message]) -> list[Message]:
    """The conversation with what the system says at the head of the user's first turn."""
    if not system:
        return rest
    if rest and rest[0].role == "user":
        return [Message(role="user", content=f"{system}\n\n{rest[0].content}"), *rest[1:]]
    return [Message(role="user", content=system), *rest]


def _tools_section(system: str, tool_schemas: Sequence[dict[str, Any]] | None) -> str:
    """The tool list as Qwen2.5 and Qwen3 were trained to read it."""
    if not tool_schemas:
        return ""
    listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in tool_schemas)
    return (
        ("\n\n" if system else "") + "# Tools\n\n"
        "You may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def _call_problem(call: object) -> str | None:
    """Why a decoded value is not a call, or None when it is one."""
    if not isinstance(call, dict):
        return "the call must be a JSON object"
    if set(call) != {"name", "arguments"}:
        return 'the call must have exactly the keys "name" and "arguments"'
    if not isinstance(call["name"], str) or not 0 < len(call["name"]) <= MAX_NAME_CHARS:
        return f'"name" must be a string of 1 to {MAX_NAME_CHARS} characters'
    if not isinstance(call["arguments"], dict):
        return '"arguments" must be a JSON object'
    if _is_deep(call["arguments"]):
        return f"the arguments are nested deeper than {MAX_CALL_DEPTH} levels"
    try:
        json.dumps(call, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "a string holds half of a surrogate pair"
    return None


def _is_deep(value: object) -> bool:
    """Whether containers nest deeper than the cap; goes level by level, so it cannot overflow."""
    level = [value]
    for _ in range(MAX_CALL_DEPTH):
        inner: list[object] = []
        for container in level:
            if isinstance(container, dict):
                inner.extend(container.values())
            elif isinstance(container, list):
                inner.extend(container)
        level = [entry for entry in inner if isinstance(entry, dict | list)]
        if not level:
            return False
    return True


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object has the same key twice")
    return result


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"number {text[:20]} is out of range")
    return number


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _short(error: Exception) -> str:
    return str(error).replace("\n", " ")[:120]


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique_object, parse_float=_finite, parse_constant=_no_constant
)
