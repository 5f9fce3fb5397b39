"""One turn as an OpenAI-compatible request, and the reply as a turn.

Fields are those that vLLM documents for chat completions; `tests/primerl/test_openai_request.py` holds the table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from nestling.core.errors import JobFailedError
from nestling.engine.chat import (
    FinalAnswer,
    MalformedCall,
    ToolCall,
    parse_turn,
    render_call,
)
from nestling.jobs.env_protocol import ProtocolError, check_json

__all__ = ["AskedTurn", "SampledTurn", "answer_messages", "read_turn", "turn_body"]

_Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTurn:
    """What differs from turn to turn."""

    messages: Sequence[_Json]
    tools: Sequence[_Json]
    """Schemas to show; none for models that know their tools by name."""
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """A reply as the rollout code reads turns."""

    text: str
    """The whole turn; a structured call is written as the model writes it."""
    parsed: ToolCall | FinalAnswer | MalformedCall
    truncated: bool
    message: _Json
    """The assistant message to send back."""
    call_ids: tuple[str, ...]
    completion_tokens: int | None
    """As the server counts, the end of the turn included; None: it does not say."""


def turn_body(turn: AskedTurn, *, model: str, temperature: float, extensions: bool) -> _Json:
    """The body of POST /chat/completions.

    `extensions` adds what OpenAI has no field for: no thinking, text as it was sampled, and neutral values for what vLLM
    would otherwise take from the model's own generation_config.json.
    """
    body: _Json = {
        "model": model,
        "messages": list(turn.messages),
        "temperature": temperature,
        "top_p": 1.0,
        "max_tokens": turn.max_tokens,
        "seed": turn.seed,
        "stream": False,
    }
    if turn.tools:
        body |= {"tools": list(turn.tools), "tool_choice": "auto"}
    if extensions:
        body |= {
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            # The shipped vocabularies have calls as special tokens, which vLLM leaves out unless told otherwise.
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "chat_template_kwargs": {"enable_thinking": False},
        }
    return body


class _Lenient(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Function(_Lenient):
    name: str
    arguments: str | None = None


class _Call(_Lenient):
    id: str = ""
    function: _Function


class _Message(_Lenient):
    content: str | None = None
    tool_calls: tuple[_Call, ...] | None = None


class _Choice(_Lenient):
    message: _Message
    finish_reason: str | None = None


class _Usage(_Lenient):
    completion_tokens: int | None = None


class _Completion(_Lenient):
    choices: tuple[_Choice, ...]
    usage: _Usage | None = None


def read_turn(value: object) -> SampledTurn:
    """Read a completion.

    Raises:
        JobFailedError: `scorer.protocol`, when it is none.
    """
    try:
        completion = _Completion.model_validate(value)
        choice = completion.choices[0]
    except (ValidationError, IndexError) as error:
        raise JobFailedError(
            "scorer.protocol", f"the server's reply is no completion: {error}"[:500]
        ) from error
    content, calls = choice.message.content or "", choice.message.tool_calls or ()
    parsed = _structured(content, calls) if calls else parse_turn(content)
    text = content + "\n".join(_rendered(call.function) for call in calls)
    message: _Json = {"role": "assistant", "content": choice.message.content}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": call.function.arguments or "{}",
                },
            }
            for call in calls
        ]
    return SampledTurn(
        text=text,
        parsed=_carried(parsed),
        truncated=choice.finish_reason == "length",
        message=message,
        call_ids=tuple(call.id for call in calls),
        completion_tokens=completion.usage.completion_tokens if completion.usage else None,
    )


def answer_messages(turn: SampledTurn, answer: str) -> list[_Json]:
    """What follows the turn in the history: the answer to its call, or to what should have been one."""
    if turn.call_ids:
        return [
            {"role": "tool", "tool_call_id": call_id, "content": answer}
            for call_id in turn.call_ids
        ]
    # A call that the server left in the text has no id; templates of this dialect write results as this.
    return [{"role": "user", "content": f"<tool_response>\n{answer}\n</tool_response>"}]


def _structured(content: str, calls: Sequence[_Call]) -> ToolCall | MalformedCall:
    if len(calls) > 1:
        return MalformedCall(reason="expected one call in a turn and nothing more")
    function = calls[0].function
    try:
        arguments = json.loads(function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        return MalformedCall(reason=f"the arguments are not valid JSON: {error}"[:200])
    if not isinstance(arguments, dict):
        return MalformedCall(reason='"arguments" must be a JSON object')
    return ToolCall(name=function.name, arguments=arguments, text_before=content)


def _rendered(function: _Function) -> str:
    try:
        arguments = json.loads(function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        return render_call(function.name, arguments)
    return f"<tool_call>\n{function.name} {function.arguments}\n</tool_call>"


def _carried(
    parsed: ToolCall | FinalAnswer | MalformedCall,
) -> ToolCall | FinalAnswer | MalformedCall:
    """Arguments that cannot travel to an environment make a call malformed, as in `jobs.rollouts`."""
    if isinstance(parsed, ToolCall):
        try:
            check_json(parsed.arguments)
        except ProtocolError as error:
            return MalformedCall(reason=f"the arguments hold {error}")
    return parsed
