"""string_pipeline, the trusted half: solution, plausible errors, vocabulary."""

from __future__ import annotations

import random
from typing import Any, Final

from nestling.families.family import Item, RuledFamily, Solution, call_pieces
from nestling.families.public import string_pipeline as rules
from nestling.families.public.steps import LABELS

__all__ = ["STRING_PIPELINE", "StringPipeline"]


class StringPipeline(RuledFamily):
    """Composed string transformations."""

    name = "string_pipeline"
    rules = rules
    spec = (
        "Teach a small model to push a short string through a chain of operations. It must make one "
        "apply call per operation, each on the string the call before gave, and then state the "
        "last string."
    )
    eval_range = (2, 4)
    held_out = False
    vocabulary = (rules.SYSTEM_PROMPT, "string ", *rules.OPERATIONS, *call_pieces(rules))

    def solve(self, item: Item) -> Solution:
        """One call per operation."""
        text = item.world["first"]
        for label, operation in zip(LABELS, item.world["operations"], strict=False):
            text = (yield label, "apply", {"operation": operation, "text": text}) or text
        return str(text)

    def corrupt(
        self,
        item: Item,  # noqa: ARG002
        rng: random.Random,
        name: str,
        arguments: dict[str, Any],
    ) -> tuple[str, dict[str, Any]]:
        """Another operation, or one letter changed."""
        operation, text = arguments["operation"], arguments["text"]
        if rng.random() < 0.5:
            operation = rng.choice([other for other in rules.OPERATIONS if other != operation])
        else:
            at = rng.randrange(len(text))
            letter = rng.choice([other for other in rules.LETTERS if other != text[at]])
            text = text[:at] + letter + text[at + 1 :]
        return name, {"operation": operation, "text": text}

    def guess(self, item: Item, rng: random.Random) -> str:  # noqa: ARG002
        """A string of the usual length."""
        return "".join(rng.choice(rules.LETTERS) for _ in range(4))


STRING_PIPELINE: Final = StringPipeline()
