"""Rows with named columns, and the same as CSV text."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from nestling.outer.stats import Estimate

__all__ = ["Cell", "Table", "estimate_cells", "estimate_columns"]

Cell = str | int | float | bool | None

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells by row; None is an empty cell."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]

    def csv(self) -> str:
        """Comma-separated with a header; text can never be taken for a spreadsheet formula."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([[_cell(cell) for cell in row] for row in self.rows])
        return buffer.getvalue()


def estimate_columns(name: str) -> tuple[str, ...]:
    """Columns for `estimate_cells`."""
    return (f"{name}_mean", f"{name}_lo", f"{name}_hi", f"{name}_n")


def estimate_cells(estimate: Estimate | None) -> tuple[Cell, ...]:
    """Mean, both ends of the interval, and n."""
    if estimate is None:
        return (None, None, None, 0)
    return (estimate.mean, estimate.lo, estimate.hi, estimate.n)


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str) and value.startswith(_FORMULA_STARTS):
        return "'" + value
    return str(value)
