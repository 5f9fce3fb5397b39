"""A sampled turn on its way to the client: one completion, or server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from nestling.engine.serve_chat import ApiError, ChatRequest, History, Reply, reply_message
from nestling.engine.serve_sampling import Piece, SamplingRequest
from nestling.engine.serve_text import TextStream, logprob_entries
from nestling.engine.tokenizer import Tokenizer

__all__ = ["Answer"]


class Answer:
    """One turn on its way to the client."""

    def __init__(
        self,
        history: History,
        tokenizer: Tokenizer,
        asked: ChatRequest,
        request: SamplingRequest,
        pieces: asyncio.Queue[Piece],
        head: dict[str, Any],
    ) -> None:
        self._history = history
        self._tokenizer = tokenizer
        self._asked = asked
        self._request = request
        self._pieces = pieces
        self._head = head
        self._ids: list[int] = []
        self._logprobs: list[float] = []

    async def whole(self, has_left: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        """The completion as one object; nothing more is sampled for a client that has left."""
        stop = None
        try:
            while stop is None:
                stop = (await self._next()).stop
                if stop is None and await has_left():
                    raise ApiError("the client left", status=499)
        finally:
            self._request.cancelled = True
        message, finish = self._message(stop)
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": finish,
            "logprobs": None,
        }
        if self._asked.logprobs:
            entries = logprob_entries(self._tokenizer, self._ids, self._logprobs)
            choice["logprobs"] = {"content": entries}
        answer = {"object": "chat.completion", **self._head, "choices": [choice]}
        if self._asked.return_token_ids:
            choice["token_ids"] = self._ids
            answer["prompt_token_ids"] = list(self._request.ids)
        return {**answer, "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """The completion as server-sent events; text that may be a call is held back until the end."""
        text = TextStream(self._tokenizer, hides_calls=self._asked.wants_calls)
        stop = None
        try:
            yield self._event({"role": "assistant", "content": ""})
            while stop is None:
                piece = await self._next()
                stop = piece.stop
                shown = text.add(piece.ids) if stop is None else ""
                if stop is None and (shown or self._asked.logprobs):
                    yield self._event({"content": shown} if shown else {}, piece=piece)
            message, finish = self._message(stop)
            delta: dict[str, Any] = {}
            rest = (message["content"] or "")[text.num_shown :]
            if rest:
                delta["content"] = rest
            if "tool_calls" in message:
                delta["tool_calls"] = [{"index": 0, **call} for call in message["tool_calls"]]
            yield self._event(delta, piece=piece)
            yield self._event({}, finish=finish)
            if self._asked.stream_options and self._asked.stream_options.include_usage:
                yield _line({**self._chunk(), "choices": [], "usage": self._usage()})
        except ApiError as error:
            yield _line(error.body)
        finally:
            self._request.cancelled = True
        yield b"data: [DONE]\n\n"

    async def _next(self) -> Piece:
        piece = await self._pieces.get()
        if piece.stop == "error":
            raise ApiError(piece.error, status=500, kind="server_error")
        self._ids += piece.ids
        self._logprobs += piece.logprobs
        return piece

    def _message(self, stop: str) -> tuple[dict[str, Any], str]:
        """The reply, kept in the history."""
        ids = self._ids[:-1] if stop == "stop" else self._ids
        reply = Reply(
            ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
            text=self._tokenizer.decode(ids),
            stop=stop,
        )
        call_id = f"call_{self._head['id'].rpartition('-')[2]}"
        message, finish = reply_message(reply, self._asked, call_id)
        self._history.remember(self._request.ids, message, self._ids)
        return message, finish

    def _usage(self) -> dict[str, int]:
        prompt, sampled = len(self._request.ids), len(self._ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }

    def _chunk(self) -> dict[str, Any]:
        return {"object": "chat.completion.chunk", **self._head}

    def _event(
        self, delta: dict[str, Any], *, piece: Piece | None = None, finish: str | None = None
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
        if piece is not None and self._asked.logprobs:
            entries = logprob_entries(self._tokenizer, piece.ids, piece.logprobs)
            choice["logprobs"] = {"content": entries}
        if piece is not None and self._asked.return_token_ids:
            choice["token_ids"] = list(piece.ids)
        return _line({**self._chunk(), "choices": [choice]})


def _line(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()
