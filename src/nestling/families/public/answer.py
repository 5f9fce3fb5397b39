"""The one way to state a final answer."""

from __future__ import annotations

import re

__all__ = ["parse_answer"]

_ANSWER = re.compile(r"ANSWER: (\S+)")


def parse_answer(text: str) -> str | None:
    """The value of a turn that is exactly `ANSWER: <value>`, else None."""
    match = _ANSWER.fullmatch(text)
    return match.group(1) if match else None
