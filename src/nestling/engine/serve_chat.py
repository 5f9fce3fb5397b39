"""Chat completions as the OpenAI API states them, to token ids and back.

History is preserved token for token: a turn that this server sampled and a client sends back is put into
the next prompt as the tokens that were sampled, not as its text encoded anew.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nestling.core.errors import NestlingError
from nestling.engine.chat import Message, ToolCall, parse_turn, prompt_ids, render_call
from nestling.engine.tokenizer import Tokenizer

__all__ = ["ApiError", "ChatRequest", "History", "Reply", "parse_request", "reply_message"]

_MAX_REMEMBERED: Final = 8192
_RESULT_START: Final = "<tool_response>\n"
_RESULT_END: Final = "\n</tool_response>"
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "n": (None, 1),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "top_logprobs": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "stop": (None, [], ""),
    "response_format": (None, {"type": "text"}),
}
"""Settings that are accepted only where they change nothing."""


class ApiError(NestlingError):
    """An answer in the OpenAI error form."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Lenient(BaseModel):
    """Fields beyond those named are for other servers."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class _Function(_Lenient):
    name: str
    arguments: str | dict[str, Any] = ""


class _Call(_Lenient):
    id: str = ""
    type: Literal["function"] = "function"
    function: _Function


class _Part(_Lenient):
    type: Literal["text"]
    text: str


class _Turn(_Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | tuple[_Part, ...] | None = None
    tool_calls: tuple[_Call, ...] | None = None

    @property
    def text(self) -> str:
        """The content as one string."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class _StreamOptions(_Lenient):
    include_usage: bool = False


class ChatRequest(_Lenient):
    """What a client asks for."""

    model: str = ""
    messages: tuple[_Turn, ...] = Field(min_length=1)
    tools: tuple[dict[str, Any], ...] | None = None
    tool_choice: Any = None
    temperature: float | None = Field(None, ge=0, le=100)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    logprobs: bool = False
    return_token_ids: bool = False
    """Not of OpenAI: prompt and sampled ids come with the answer."""

    @property
    def wants_calls(self) -> bool:
        """Calls in the text become `tool_calls`."""
        return bool(self.tools) and self.tool_choice != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One sampled turn."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    """Without the turn end."""
    stop: str


def parse_request(raw: bytes) -> ChatRequest:
    """Read a request's body; raises `ApiError`."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError("the body must be a JSON object")
    for name, neutral in _NEUTRAL.items():
        if value.get(name) not in neutral:
            raise ApiError(
                f"{name} is not supported here; leave it out",
                code="unsupported_parameter",
                param=name,
            )
    try:
        request = ChatRequest.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ApiError(f"{where}: {first['msg']}", param=where) from error
    if request.tool_choice not in (None, "auto", "none"):
        raise ApiError(
            "tool_choice must be auto or none here",
            code="unsupported_parameter",
            param="tool_choice",
        )
    return request


def reply_message(reply: Reply, request: ChatRequest, call_id: str) -> tuple[dict[str, Any], str]:
    """The assistant message and its finish reason.

    A well-formed call becomes `tool_calls`; a malformed one stays text, so that the client sees it.
    """
    parsed = parse_turn(reply.text) if request.wants_calls and reply.stop == "stop" else None
    if not isinstance(parsed, ToolCall):
        return {"role": "assistant", "content": reply.text}, reply.stop
    arguments = json.dumps(parsed.arguments, ensure_ascii=False)
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": parsed.name, "arguments": arguments},
    }
    content = parsed.text_before or None
    return {"role": "assistant", "content": content, "tool_calls": [call]}, "tool_calls"


class History:
    """Conversations to ids; remembers what was sampled. Used from one thread."""

    def __init__(self, tokenizer: Tokenizer, *, shows_tools: bool) -> None:
        self._tokenizer = tokenizer
        self._shows_tools = shows_tools
        self._sampled: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def prompt(self, request: ChatRequest) -> list[int]:
        """Ids up to the header of the turn to sample; raises `ApiError`."""
        turns = [_as_message(turn) for turn in request.messages]
        tools = request.tools if self._shows_tools and request.tool_choice != "none" else None
        spoken = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
        first = spoken[0] if spoken else len(turns)
        if first == 0:
            raise ApiError("the first message must not be of the assistant", param="messages")
        try:
            ids = prompt_ids(self._tokenizer, turns[:first], tools)
            for place, i in enumerate(spoken):
                following = spoken[place + 1] if place + 1 < len(spoken) else len(turns)
                if following == i + 1 < len(turns):
                    raise ApiError("two assistant messages follow each other", param="messages")
                ids += self._turn(ids, turns[i].content)
                ids += self._after(turns[i + 1 : following])
        except ValueError as error:
            raise ApiError(str(error), param="messages") from error
        return ids

    def remember(self, prompt: Sequence[int], message: dict[str, Any], ids: Sequence[int]) -> None:
        """`message` was sampled after `prompt` as `ids`."""
        end = self._tokenizer.turn_end_id
        closed = tuple(ids) if ids and ids[-1] == end else (*ids, end)
        content = _as_message(_Turn.model_validate(message)).content
        self._sampled[_key(prompt, content)] = closed
        if len(self._sampled) > _MAX_REMEMBERED:
            self._sampled.popitem(last=False)

    def _turn(self, before: Sequence[int], content: str) -> tuple[int, ...]:
        key = _key(before, content)
        known = self._sampled.get(key)
        if known is not None:
            self._sampled.move_to_end(key)
            return known
        return (*self._tokenizer.encode(content), self._tokenizer.turn_end_id)

    def _after(self, turns: Sequence[Message]) -> list[int]:
        """What follows an assistant turn up to the next one's header."""
        layout = self._tokenizer.layout
        header = len(self._tokenizer.encode_markup(layout.opening + layout.header("assistant")))
        blank = Message(role="assistant", content="")
        return prompt_ids(self._tokenizer, [blank, *turns])[header + 1 :]


def _as_message(turn: _Turn) -> Message:
    """Calls as text, in the form the model writes them."""
    text = turn.text
    if turn.role == "developer":
        return Message(role="system", content=text)
    if turn.role == "assistant":
        calls = "\n".join(_rendered(call.function) for call in turn.tool_calls or ())
        return Message(role="assistant", content=text + calls)
    if turn.role == "user" and text.startswith(_RESULT_START) and text.endswith(_RESULT_END):
        # How clients without a call id give a result; the same tokens in this dialect.
        inner = text.removeprefix(_RESULT_START).removesuffix(_RESULT_END)
        return Message(role="tool", content=inner)
    return Message(role=turn.role, content=text)


def _rendered(function: _Function) -> str:
    arguments = function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ApiError(
                f"the arguments of {function.name} are not JSON: {error}", param="messages"
            ) from error
    if not isinstance(arguments, dict):
        raise ApiError(f"the arguments of {function.name} are not an object", param="messages")
    return render_call(function.name, arguments)


def _key(before: Sequence[int], content: str) -> bytes:
    digest = hashlib.sha256(json.dumps(list(before)).encode())
    digest.update(content.encode("utf-8", "surrogatepass"))
    return digest.digest()
