"""Token counts of plays that no model samples: what a model that says the same words has in `jobs.rollouts`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from nestling.engine.chat import tool_result_ids
from nestling.engine.tokenizer import Tokenizer
from nestling.jobs.opening import opening_ids

__all__ = ["TokenCount"]


class TokenCount:
    """Counts of one vocabulary and set of tools; the same text is counted once."""

    def __init__(self, tokenizer: Tokenizer, schemas: Sequence[dict[str, Any]]) -> None:
        """`schemas` of the tools count for models that are shown them: those of the hub."""
        shown = None if tokenizer.is_closed else schemas

        @lru_cache(maxsize=256)
        def opening(system_prompt: str, prompt: str) -> int:
            return len(opening_ids(tokenizer, system_prompt, prompt, shown))

        @lru_cache(maxsize=4096)
        def turn(text: str) -> int:
            return len(tokenizer.encode(text)) + 1

        @lru_cache(maxsize=4096)
        def reply(text: str) -> int:
            return len(tool_result_ids(tokenizer, text))

        self._opening, self._turn, self._reply = opening, turn, reply

    def opening(self, system_prompt: str, prompt: str) -> int:
        """What the model reads before its first turn."""
        return self._opening(system_prompt, prompt)

    def turn(self, text: str) -> int:
        """A turn of the model with its end."""
        return self._turn(text)

    def reply(self, text: str) -> int:
        """A tool's answer, up to where the next turn begins."""
        return self._reply(text)
