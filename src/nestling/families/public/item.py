"""One task item: what the small model is asked and what its tools need to know."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Item"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A question with its world; everything in it survives JSON."""

    prompt: str
    system_prompt: str
    """Names the tools, briefly; small models see no schema."""
    answer: str
    num_calls: int
    """Tool calls of the shortest correct solution."""
    world: dict[str, Any] = field(default_factory=dict)
    """What the tools look up or start from."""

    def to_dict(self) -> dict[str, Any]:
        """The item as plain JSON values, fresh copies all the way down."""
        return {
            "prompt": self.prompt,
            "system_prompt": self.system_prompt,
            "answer": self.answer,
            "num_calls": self.num_calls,
            "world": _copy(self.world),
        }

    @property
    def identity(self) -> str:
        """A hash of question, world and answer; two items with one identity are the same item."""
        parts = [self.prompt, self.answer, self.world]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _copy(value: object) -> object:
    if isinstance(value, dict):
        return {key: _copy(member) for key, member in value.items()}
    return [_copy(member) for member in value] if isinstance(value, list) else value
