"""Values as text for people."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime

from nestling.outer.stats import Estimate

__all__ = [
    "duration",
    "estimate",
    "moment",
    "number",
    "p_value",
    "percent",
    "signed",
    "usd",
    "visible",
]

NOTHING = "–"
_MAX_CHARS = 20_000
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories that do not show, or that reorder what stands beside them."""


def number(value: float | None, digits: int = 3) -> str:
    """Fixed decimals, or a dash for nothing."""
    return NOTHING if value is None else _fixed(value, digits)


def signed(value: float | None, digits: int = 3) -> str:
    """As `number`, with a plus sign before what is above 0."""
    return f"+{number(value, digits)}" if value is not None and value > 0 else number(value, digits)


def percent(value: float | None) -> str:
    """A share in whole percent."""
    return NOTHING if value is None else f"{100 * value:.0f} %"


def estimate(value: Estimate | None, digits: int = 3) -> str:
    """Mean and interval."""
    if value is None:
        return NOTHING
    if value.lo is None or value.hi is None:
        return _fixed(value.mean, digits)
    ends = f"[{_fixed(value.lo, digits)}, {_fixed(value.hi, digits)}]"
    return f"{_fixed(value.mean, digits)} {ends}"


def p_value(value: Estimate | None) -> str:
    """Of a paired difference; a dash where there was no test."""
    return NOTHING if value is None or value.p_value is None else f"{value.p_value:.3g}"


def duration(seconds: float | None) -> str:
    """Hours, minutes, seconds; the two largest units that are not zero."""
    if seconds is None:
        return NOTHING
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def moment(seconds: float | None) -> str:
    """Date and time in UTC."""
    if seconds is None:
        return NOTHING
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def usd(value: float | None) -> str:
    """Dollars, with more digits below ten cents."""
    if value is None:
        return NOTHING
    if 0 < value < 0.00005:
        return "<$0.0001"
    return f"${value:.2f}" if value >= 0.1 or value == 0 else f"${value:.4f}"


def visible(text: str) -> str:
    """Text from outside with nothing hidden in it, cut where it is very long.

    Control characters, and those that turn the direction of writing, are written as escapes.
    """
    cut = text[:_MAX_CHARS]
    clean = "".join(
        char if char in "\n\t" or unicodedata.category(char) not in _HIDDEN else _escape(char)
        for char in cut.replace("\r\n", "\n")
    )
    left = len(text) - len(cut)
    return clean if left <= 0 else f"{clean}\n… {left} more characters"


def _fixed(value: float, digits: int) -> str:
    """Fixed decimals, without a minus sign before zeros."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
