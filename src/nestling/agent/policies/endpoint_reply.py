"""An endpoint's reply as a turn. Total: any reply gives a turn, a malformed one gives a malformed turn."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from nestling.agent.policies.endpoint_budget import Usage
from nestling.engine.chat import MalformedCall, ToolCall, parse_turn, render_call

__all__ = ["EMPTY_TURN", "ReadReply", "read_reply", "turn_message", "usage_of"]

EMPTY_TURN: Final = "<tool_call>\n(the endpoint's reply was empty)\n</tool_call>"
"""What stands in the transcript for a reply without text and without a call: a malformed call."""

_OPEN: Final = "<tool_call>"
_THOUGHT: Final = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReply:
    """One reply in the harness's dialect, and as it goes back into the history."""

    text: str
    """Calls are written out as Hermes models write them."""
    message: dict[str, Any] | None
    """Of the assistant; None when there was nothing that could be sent back."""
    call_ids: tuple[str, ...] = ()
    """Structured calls of `message`, each of which must be answered."""
    truncated: bool = False


def read_reply(value: object, number: int) -> ReadReply:
    """The turn in a decoded body, whatever it is; `number` counts the turns of the episode."""
    choice = _first(value, "choices")
    said = choice.get("message")
    message: dict[str, Any] = said if isinstance(said, dict) else {}
    truncated = choice.get("finish_reason") == "length"
    content = _THOUGHT.sub("", _text(message.get("content")), count=1)
    calls = [_rendered(call) for call in _calls(message)]
    if not calls:
        text = content if content.strip() or truncated else EMPTY_TURN
        return _as_text(text, truncated=truncated)
    before = content.partition(_OPEN)[0]
    text = before + "\n".join(one.text for one in calls)
    if truncated or any(one.arguments is None for one in calls):
        return _as_text(text, truncated=truncated)
    return _as_calls(text, before, calls, number)


def turn_message(text: str, number: int) -> ReadReply:
    """A turn of an earlier try, by its text, as if it had just come."""
    before, marker, _ = text.partition(_OPEN)
    if not marker or text == EMPTY_TURN:
        return _as_text(text)
    parsed = parse_turn(text)
    if not isinstance(parsed, ToolCall):
        return _as_text(text)
    call = _Call(
        text=text.removeprefix(before), name=parsed.name, arguments=json.dumps(parsed.arguments)
    )
    return _as_calls(text, before, [call], number)


def usage_of(value: object) -> Usage | None:
    """What the endpoint says it counted; None when it does not say."""
    usage = value.get("usage") if isinstance(value, dict) else None
    if not isinstance(usage, dict):
        return None
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        return None
    return Usage(tokens_in=counts[0] or 0, tokens_out=counts[1] or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    text: str
    name: str
    arguments: str | None
    """JSON of an object; None when the call cannot be sent back as one."""


def _as_text(text: str, *, truncated: bool = False) -> ReadReply:
    has_words = bool(text.strip()) and text != EMPTY_TURN
    message = {"role": "assistant", "content": text} if has_words else None
    return ReadReply(text=text, message=message, truncated=truncated)


def _as_calls(text: str, before: str, calls: list[_Call], number: int) -> ReadReply:
    # Nine letters and digits: the narrowest form that some endpoints insist on.
    ids = tuple(f"call{number % 1000:03d}{place % 100:02d}" for place in range(len(calls)))
    listed = [
        {"id": call_id, "type": "function", "function": _function(call)}
        for call_id, call in zip(ids, calls, strict=True)
    ]
    message = {"role": "assistant", "content": before, "tool_calls": listed}
    return ReadReply(text=text, message=message, call_ids=ids)


def _function(call: _Call) -> dict[str, Any]:
    return {"name": call.name, "arguments": call.arguments}


def _rendered(call: dict[str, Any]) -> _Call:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    name, raw = function.get("name"), function.get("arguments")
    arguments = _decoded(raw)
    if isinstance(name, str) and name and isinstance(arguments, dict):
        text = render_call(name, arguments)
        if not isinstance(parse_turn(text), MalformedCall):
            return _Call(text=text, name=name, arguments=json.dumps(arguments))
    shown = raw if isinstance(raw, str) else json.dumps(raw)
    text = f'{_OPEN}\n{{"name": {json.dumps(name)}, "arguments": {shown}}}\n</tool_call>'
    return _Call(text=text, name=str(name), arguments=None)


def _decoded(raw: object) -> object:
    """Arguments as an object: JSON text as the API has it, or the object itself as some give it."""
    if raw is None or raw == "":
        return {}
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    listed = message.get("tool_calls")
    if isinstance(listed, list):
        return [one for one in listed if isinstance(one, dict)]
    return []


def _first(value: object, name: str) -> dict[str, Any]:
    listed = value.get(name) if isinstance(value, dict) else None
    first = listed[0] if isinstance(listed, list) and listed else None
    return first if isinstance(first, dict) else {}


def _text(content: object) -> str:
    """Text of a message, plain or in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [part.get("text") for part in content if isinstance(part, dict)]
    return "".join(part for part in parts if isinstance(part, str))
