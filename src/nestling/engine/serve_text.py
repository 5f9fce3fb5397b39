"""Sampled tokens as text that can be sent before the turn is over, and as log-probability entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from nestling.engine.tokenizer import Tokenizer

__all__ = ["TextStream", "logprob_entries"]

_CALL: Final = "<tool_call>"
_BROKEN: Final = "\ufffd"
"""What the bytes of an unfinished character decode to."""


class TextStream:
    """Text of a growing turn, without what later tokens may still change."""

    def __init__(self, tokenizer: Tokenizer, *, hides_calls: bool) -> None:
        self._tokenizer = tokenizer
        self._hides_calls = hides_calls
        self._ids: list[int] = []
        self.num_shown = 0
        """Characters given so far."""

    def add(self, ids: Sequence[int]) -> str:
        """The text that has become certain with these tokens; a call is never part of it."""
        self._ids += ids
        text = self._tokenizer.decode(self._ids).rstrip(_BROKEN)
        if self._hides_calls:
            text = text[: _safe_length(text)]
        shown = text[self.num_shown :]
        self.num_shown += len(shown)
        return shown


def logprob_entries(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[float]
) -> list[dict[str, Any]]:
    """OpenAI's form: token, bytes, logprob; alternatives are not computed."""
    entries = []
    for token_id, logprob in zip(ids, logprobs, strict=True):
        token = tokenizer.decode([token_id])
        entries.append(
            {
                "token": token,
                "bytes": list(token.encode()),
                "logprob": logprob,
                "top_logprobs": [],
            }
        )
    return entries


def _safe_length(text: str) -> int:
    """Characters before a call, or before an end that may become the start of one."""
    start = text.find(_CALL)
    if start >= 0:
        return start
    for size in range(min(len(_CALL) - 1, len(text)), 0, -1):
        if text.endswith(_CALL[:size]):
            return len(text) - size
    return len(text)
