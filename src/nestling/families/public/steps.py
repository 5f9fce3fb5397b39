"""What all families share: step labels, names, difficulty and the reading of tool calls."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from typing import Any

__all__ = [
    "BAD_CALL",
    "LABELS",
    "LAST_LABEL",
    "NAMES",
    "Signatures",
    "check_code",
    "draw_difficulty",
    "read_call",
]

LABELS = ("(a)", "(b)", "(c)", "(d)", "(e)", "(f)", "(g)", "(h)")
"""One for each step of a prompt; the model writes the label before each call."""
LAST_LABEL = "(q)"
"""Marks the closing step of a prompt."""
NAMES = ("ann", "bob", "cat", "dan", "eve", "fay", "gus", "hal", "ivy", "jon", "kim", "leo")
BAD_CALL = "error: bad call"
"""What a tool says to an unknown name or to missing, extra or wrong arguments."""

Signatures = Mapping[str, Mapping[str, type]]
"""Tool name to argument name to its JSON type."""


def draw_difficulty(rng: random.Random, lo: int, hi: int, highest: int) -> int:
    """A difficulty between lo and hi, both first brought into 1..highest.

    Raises:
        ValueError: lo is above hi.
    """
    if lo > hi:
        raise ValueError(f"lo={lo} is above hi={hi}; give sample(rng, lo, hi) with lo <= hi")
    return rng.randint(min(max(lo, 1), highest), min(max(hi, 1), highest))


def read_call(signatures: Signatures, name: object, arguments: object) -> tuple[Any, ...] | None:
    """The arguments in signature order, or None when the call does not fit its signature.

    Types are exact: `True` is no int and `"5"` is no int.
    """
    expected = signatures.get(name) if isinstance(name, str) else None
    if expected is None or not isinstance(arguments, dict) or set(arguments) != set(expected):
        return None
    if any(type(arguments[key]) is not kind for key, kind in expected.items()):
        return None
    return tuple(arguments[key] for key in expected)


def check_code(*parts: object) -> str:
    """A two-digit code (10..99) of what was done; it cannot be guessed from the prompt."""
    return str(zlib.crc32(repr(parts).encode()) % 90 + 10)
