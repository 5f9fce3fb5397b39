"""Pieces of a Markdown page."""

from __future__ import annotations

from collections.abc import Sequence

from nestling.outer.stats import Estimate
from nestling.report import shown

__all__ = ["NOT_MEASURED", "NOT_RUN", "cell", "gain", "mean", "table"]

NOT_RUN = "not yet run"
NOT_MEASURED = "not measured"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cell(one) for one in line) + " |" for line in lines]


def cell(text: str) -> str:
    """Text that stays inside its cell."""
    return shown.visible(text).replace("\n", " ").replace("|", "\\|")


def mean(one: Estimate | None) -> str:
    """Mean, interval and n."""
    return NOT_MEASURED if one is None else f"{shown.estimate(one)}, n = {one.n}"


def gain(one: Estimate | None) -> str:
    """A paired difference with its interval, n and p."""
    if one is None:
        return NOT_MEASURED
    ends = (
        ""
        if one.lo is None or one.hi is None
        else f" [{shown.signed(one.lo)}, {shown.signed(one.hi)}]"
    )
    p_value = "" if one.p_value is None else f", p = {one.p_value:.2g}"
    return f"{shown.signed(one.mean)}{ends}, n = {one.n}{p_value}"
