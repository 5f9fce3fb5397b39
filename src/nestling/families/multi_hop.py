"""multi_hop, the trusted half: solution, plausible errors, vocabulary."""

from __future__ import annotations

import random
from typing import Any, Final

from nestling.families.family import Item, RuledFamily, Solution, call_pieces
from nestling.families.public import multi_hop as rules
from nestling.families.public.steps import LABELS, NAMES

__all__ = ["MULTI_HOP", "MultiHop"]


class MultiHop(RuledFamily):
    """Dependent look-ups in a world of people."""

    name = "multi_hop"
    rules = rules
    spec = (
        "Teach a small model to answer multi-hop persona questions. It must look up one relation "
        "at a time, innermost first, each on the person the look-up before gave, and then state "
        "the last name or color."
    )
    eval_range = (2, 4)
    held_out = False
    vocabulary = (
        rules.SYSTEM_PROMPT,
        "who is ",
        " of ",
        *rules.RELATIONS,
        "color",
        *rules.COLORS,
        *call_pieces(rules),
    )

    def solve(self, item: Item) -> Solution:
        """One look-up per hop."""
        value = item.world["first"]
        for label, relation in zip(LABELS, item.world["relations"], strict=False):
            value = (yield label, "lookup", {"person": value, "relation": relation}) or value
        return str(value)

    def corrupt(
        self,
        item: Item,  # noqa: ARG002
        rng: random.Random,
        name: str,
        arguments: dict[str, Any],
    ) -> tuple[str, dict[str, Any]]:
        """Another relation or another person."""
        key, choices = rng.choice((("relation", rules.RELATIONS), ("person", NAMES)))
        wrong = rng.choice([choice for choice in choices if choice != arguments[key]])
        return name, {**arguments, key: wrong}

    def guess(self, item: Item, rng: random.Random) -> str:  # noqa: ARG002
        """Any name."""
        return rng.choice(NAMES)


MULTI_HOP: Final = MultiHop()
