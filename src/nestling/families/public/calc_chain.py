"""calc_chain: a chain of sums, differences and products, one calculator call per step."""

from __future__ import annotations

import random
import re
from typing import Any

from .item import Item
from .steps import BAD_CALL, LABELS, Signatures, draw_difficulty, read_call

__all__ = ["HIGHEST", "SIGNATURES", "SYSTEM_PROMPT", "WORDS", "call", "sample", "start"]

SYSTEM_PROMPT = "tools: calc"
HIGHEST = 8
"""Most steps of an item."""
SIGNATURES: Signatures = {"calc": {"expression": str}}
WORDS = {"+": "add", "-": "subtract", "*": "multiply by"}

_EXPRESSION = re.compile(r"(-?\d{1,6})([-+*])(-?\d{1,6})", re.ASCII)
_LOWEST_VALUE, _HIGHEST_VALUE = -200, 1000


def sample(rng: random.Random, lo: int, hi: int) -> Item:
    """An item of lo to hi steps (within 1..8); the result lies between -200 and 1000."""
    num_steps = draw_difficulty(rng, lo, hi, HIGHEST)
    while True:
        first = rng.randint(2, 99)
        steps = [_draw_step(rng) for _ in range(num_steps)]
        value = first
        for operator, operand in steps:
            value = _apply(value, operator, operand)
        if _LOWEST_VALUE < value < _HIGHEST_VALUE:
            break
    listed = " ".join(
        f"{label} {WORDS[operator]} {operand}."
        for label, (operator, operand) in zip(LABELS, steps, strict=False)
    )
    return Item(
        prompt=f"start with {first}. {listed}",
        system_prompt=SYSTEM_PROMPT,
        answer=str(value),
        num_calls=num_steps,
        world={"first": first, "steps": [list(step) for step in steps]},
    )


def start(world: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG001 (every family has the same form)
    """No state: a calculator remembers nothing."""
    return {}


def call(world: dict[str, Any], state: dict[str, Any], name: str, arguments: dict[str, Any]) -> str:  # noqa: ARG001
    """The value of `calc(expression)`, for example `17+5`; two integers and one of + - *."""
    values = read_call(SIGNATURES, name, arguments)
    match = _EXPRESSION.fullmatch(values[0]) if values else None
    if match is None:
        return BAD_CALL
    return str(_apply(int(match[1]), match[2], int(match[3])))


def _draw_step(rng: random.Random) -> tuple[str, int]:
    operator = rng.choice("++--*")
    return operator, rng.randint(2, 4) if operator == "*" else rng.randint(2, 50)


def _apply(left: int, operator: str, right: int) -> int:
    if operator == "+":
        return left + right
    return left - right if operator == "-" else left * right
