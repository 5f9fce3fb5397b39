"""What a family of tasks must provide."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any, Protocol

from nestling.families.public.item import Item

__all__ = ["Family", "Item", "Solution", "Step"]

Step = tuple[str, str, dict[str, Any]]
"""Label, tool name, arguments."""

Solution = Generator[Step, str | None, str]
"""Yields steps, is sent each tool result (None when the step was skipped), returns the answer."""


class Family(Protocol):
    """One kind of task: how items are made, what tools do, who is right.

    Pure: no verifiers, no torch. `families/public/` holds what the agent may see.
    """

    name: str
    spec: str
    """What to teach, one or two sentences, as the agent reads it."""
    tool_signatures: str
    """For example `deposit(account, amount), balance(account)`."""
    eval_range: tuple[int, int]
    """Lowest and highest difficulty of hidden items."""
    held_out: bool
    """True when the agent is never trained on it."""

    def sample(self, rng: random.Random, lo: int, hi: int) -> Item:
        """One item with a difficulty between lo and hi."""
        ...

    def grade(self, item: Item, final_text: str) -> float:
        """1.0 for exactly the right final turn, else 0.0."""
        ...

    def start(self, item: Item) -> dict[str, Any]:
        """Fresh tool state of one rollout."""
        ...

    def call(self, item: Item, state: dict[str, Any], name: str, arguments: dict[str, Any]) -> str:
        """What a tool answers; changes `state`; bad calls give a text that starts with `error:`."""
        ...

    def solve(self, item: Item) -> Solution:
        """The shortest correct solution."""
        ...

    def corrupt(
        self, item: Item, rng: random.Random, name: str, arguments: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """A plausible wrong version of one call, for noisy demonstrations."""
        ...

    def guess(self, item: Item, rng: random.Random) -> str:
        """A plausible wrong answer."""
        ...
