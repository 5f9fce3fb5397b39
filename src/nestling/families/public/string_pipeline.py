"""string_pipeline: a chain of operations on a short string, one call per operation."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from .item import Item
from .steps import BAD_CALL, LABELS, Signatures, draw_difficulty, read_call

__all__ = [
    "HIGHEST",
    "LETTERS",
    "OPERATIONS",
    "SIGNATURES",
    "SYSTEM_PROMPT",
    "call",
    "sample",
    "start",
]

SYSTEM_PROMPT = "tools: apply"
HIGHEST = 8
"""Most operations of an item."""
SIGNATURES: Signatures = {"apply": {"operation": str, "text": str}}
LETTERS = "abcdefgh"
OPERATIONS: dict[str, Callable[[str], str]] = {
    "reverse": lambda text: text[::-1],
    "rotate": lambda text: text[1:] + text[:1],
    "swap": lambda text: text[-1] + text[1:-1] + text[0],
    "drop": lambda text: text[:-1] if len(text) > 2 else text,
    "double": lambda text: text + text[-1],
}
"""reverse the string; rotate: first letter goes last; swap first and last letter; drop the last
letter (two always stay); double the last letter."""

_TEXT = re.compile(f"[{LETTERS}]{{2,16}}")


def sample(rng: random.Random, lo: int, hi: int) -> Item:
    """An item of lo to hi operations (within 1..8) on 4 to 5 letters of a..h."""
    num_steps = draw_difficulty(rng, lo, hi, HIGHEST)
    first = "".join(rng.choice(LETTERS) for _ in range(rng.randint(4, 5)))
    operations = [rng.choice(list(OPERATIONS)) for _ in range(num_steps)]
    value = first
    for operation in operations:
        value = OPERATIONS[operation](value)
    listed = " ".join(
        f"{label} {operation}." for label, operation in zip(LABELS, operations, strict=False)
    )
    return Item(
        prompt=f"string {first}. {listed}",
        system_prompt=SYSTEM_PROMPT,
        answer=value,
        num_calls=num_steps,
        world={"first": first, "operations": operations},
    )


def start(world: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG001 (every family has the same form)
    """No state: an operation changes nothing but its own text."""
    return {}


def call(world: dict[str, Any], state: dict[str, Any], name: str, arguments: dict[str, Any]) -> str:  # noqa: ARG001
    """The string that `apply(operation, text)` makes."""
    values = read_call(SIGNATURES, name, arguments)
    if values is None:
        return BAD_CALL
    operation, text = values
    if operation not in OPERATIONS or not _TEXT.fullmatch(text):
        return BAD_CALL
    return OPERATIONS[operation](text)
