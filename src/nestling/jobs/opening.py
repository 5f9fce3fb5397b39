"""What a rollout starts from: the conversation before the model's first turn, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from nestling.engine.chat import Message, prompt_ids
from nestling.engine.tokenizer import Tokenizer

__all__ = ["OPEN_RULES", "opening_ids"]

OPEN_RULES: Final = (
    "Solve the task step by step: call one tool per turn and wait for its result. When you know the "
    "result, reply with exactly ANSWER: followed by the value and nothing else."
)
"""What a model of the hub is told besides its tools; the shipped ones were made knowing it."""


def opening_ids(
    tokenizer: Tokenizer,
    system_prompt: str,
    prompt: str,
    schemas: Sequence[dict[str, Any]] | None,
) -> list[int]:
    """The ids a rollout starts from; with `schemas`, the system turn lists tools and rules."""
    parts = [system_prompt, OPEN_RULES if schemas else ""]
    system = "\n\n".join(part for part in parts if part)
    messages = [Message(role="system", content=system)] if system else []
    messages.append(Message(role="user", content=prompt))
    return prompt_ids(tokenizer, messages, schemas)
