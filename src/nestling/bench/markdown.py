"""Results as Markdown, for a file beside the record."""

from __future__ import annotations

from collections.abc import Sequence

from nestling.bench.record import BenchRecord

__all__ = ["circumstances", "table"]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; bars in cells are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def circumstances(record: BenchRecord) -> str:
    """Command, commit, machine and date, on one line."""
    return (
        f"`{record.command}`, commit {record.commit or 'not recorded'}, "
        f"{record.machine['processor']}, {record.machine['cores']} cores, {record.date}.\n"
    )
