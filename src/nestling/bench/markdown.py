"""Results as Markdown, for a file beside the record."""

from __future__ import annotations

from collections.abc import Sequence

from nestling.bench.record import BenchRecord
from nestling.report.published.markdown import table

__all__ = ["circumstances", "table_text"]


def table_text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with the end of its last line."""
    return "".join(f"{line}\n" for line in table(columns, rows))


def circumstances(record: BenchRecord) -> str:
    """Command, commit, machine and date, on one line."""
    return (
        f"`{record.command}`, commit {record.commit or 'not recorded'}, "
        f"{record.machine['processor']}, {record.machine['cores']} cores, {record.date}.\n"
    )
