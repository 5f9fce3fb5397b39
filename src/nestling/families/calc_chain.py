"""calc_chain, the trusted half: solution, plausible errors, vocabulary."""

from __future__ import annotations

import random
import re
from typing import Any, Final

from nestling.families.family import Item, RuledFamily, Solution, call_pieces
from nestling.families.public import calc_chain as rules
from nestling.families.public.steps import LABELS

__all__ = ["CALC_CHAIN", "CalcChain"]


class CalcChain(RuledFamily):
    """Chained arithmetic with a calculator."""

    name = "calc_chain"
    rules = rules
    spec = (
        "Teach a small model to compute a chain of sums, differences and products. It must make one "
        "calc call per step, each on the result of the step before, and then state the last result."
    )
    eval_range = (2, 5)
    held_out = False
    vocabulary = (
        rules.SYSTEM_PROMPT,
        "start with ",
        *(f" {word} " for word in rules.WORDS.values()),
        *call_pieces(rules),
    )

    def solve(self, item: Item) -> Solution:
        """One calc call per step."""
        value = str(item.world["first"])
        for label, (operator, operand) in zip(LABELS, item.world["steps"], strict=False):
            value = (yield label, "calc", {"expression": f"{value}{operator}{operand}"}) or value
        return value

    def corrupt(
        self,
        item: Item,  # noqa: ARG002
        rng: random.Random,
        name: str,
        arguments: dict[str, Any],
    ) -> tuple[str, dict[str, Any]]:
        """A wrong operator or operand."""
        left, operator, right = _parts(arguments["expression"])
        if rng.random() < 0.5:
            operator = rng.choice([other for other in rules.WORDS if other != operator])
        else:
            right += rng.choice((1, 10))
        return name, {"expression": f"{left}{operator}{right}"}

    def guess(self, item: Item, rng: random.Random) -> str:  # noqa: ARG002
        """A number of the usual size."""
        return str(rng.randint(1, 99))


def _parts(expression: str) -> tuple[str, str, int]:
    match = re.fullmatch(r"(-?\d+)([-+*])(\d+)", expression)
    assert match is not None
    return match[1], match[2], int(match[3])


CALC_CHAIN: Final = CalcChain()
