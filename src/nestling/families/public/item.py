"""One task item: what the small model is asked and what its tools need to know."""

from __future__ import annotations

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
