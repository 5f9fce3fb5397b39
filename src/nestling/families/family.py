"""What a family of tasks must provide, and the half of it that every family shares."""

from __future__ import annotations

import random
from collections.abc import Generator
from types import ModuleType
from typing import Any, Protocol

from nestling.families.public.answer import parse_answer
from nestling.families.public.item import Item

__all__ = ["Family", "Item", "RuledFamily", "Solution", "Step", "call_pieces"]

Step = tuple[str, str, dict[str, Any]]
"""Label, tool name, arguments."""

Solution = Generator[Step, str | None, str]
"""Yields steps, is sent each tool result (None when the step was skipped), returns the answer."""


class Family(Protocol):
    """One kind of task: how items are made, what tools do, who is right.

    Pure: no verifiers, no torch. A public package (`families/public/` for our own) holds what the
    agent may see; its modules import each other and the shared ones relatively.
    """

    name: str
    spec: str
    """What to teach, a few sentences, as the agent reads it."""
    eval_range: tuple[int, int]
    """Lowest and highest difficulty of hidden items."""
    held_out: bool
    """True when the agent is never trained on it."""
    vocabulary: tuple[str, ...]
    """Strings that the tiny models' tokenizer keeps whole."""

    @property
    def tool_signatures(self) -> str:
        """For example `deposit(account: str, amount: int), balance(account: str)`."""
        ...

    @property
    def public_package(self) -> str:
        """Import name of the package that holds its public modules."""
        ...

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the family's own modules in its public package."""
        ...

    @property
    def highest(self) -> int:
        """Highest difficulty that `sample` can make."""
        ...

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


class RuledFamily:
    """The shared half: items and tools come from the public rules module, grading is strict."""

    name: str
    rules: ModuleType
    """A module of the public package with HIGHEST, SIGNATURES, sample, start and call."""

    @property
    def public_package(self) -> str:
        """The package of the rules."""
        return self.rules.__name__.rpartition(".")[0]

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the family's own modules in its public package."""
        return (self.name, f"{self.name}_tools")

    @property
    def tool_signatures(self) -> str:
        """All tools with their typed arguments, on one line."""
        return ", ".join(
            f"{tool}({', '.join(f'{key}: {kind.__name__}' for key, kind in arguments.items())})"
            for tool, arguments in self.rules.SIGNATURES.items()
        )

    @property
    def highest(self) -> int:
        """Highest difficulty that `sample` can make."""
        highest: int = self.rules.HIGHEST
        return highest

    def sample(self, rng: random.Random, lo: int, hi: int) -> Item:
        """One item with a difficulty between lo and hi."""
        item: Item = self.rules.sample(rng, lo, hi)
        return item

    def grade(self, item: Item, final_text: str) -> float:
        """1.0 when the turn is exactly `ANSWER: <the answer>`, else 0.0."""
        return float(parse_answer(final_text) == item.answer)

    def start(self, item: Item) -> dict[str, Any]:
        """Fresh tool state of one rollout."""
        state: dict[str, Any] = self.rules.start(item.world)
        return state

    def call(self, item: Item, state: dict[str, Any], name: str, arguments: dict[str, Any]) -> str:
        """What a tool answers; changes `state`; bad calls give a text that starts with `error:`."""
        answer: str = self.rules.call(item.world, state, name, arguments)
        return answer


def call_pieces(rules: ModuleType) -> tuple[str, ...]:
    """The fixed text of every call of a family, cut where arguments go in.

    Together with the argument values these pieces spell each call exactly as `json.dumps` does, so
    that a call costs one token per argument and one per gap.
    """
    pieces: list[str] = []
    for tool, arguments in rules.SIGNATURES.items():
        text = f'<tool_call>\n{{"name": "{tool}", "arguments": {{'
        for index, (key, kind) in enumerate(arguments.items()):
            text += f'{", " if index else ""}"{key}": ' + ('"' if kind is str else "")
            pieces.append(text)
            text = '"' if kind is str else ""
        pieces.append(text + "}}\n</tool_call>")
    return tuple(dict.fromkeys(pieces))
