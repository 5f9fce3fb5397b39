"""The comparison of several runs: one HTML file, figures and tables beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from nestling import __version__
from nestling.core.rundir import write_atomic
from nestling.report.compare import Compared, compare_runs, differing_settings
from nestling.report.figures.comparing import compare_all
from nestling.report.page import write_figures
from nestling.report.rendering import environment
from nestling.report.table import Cell, Table, estimate_cells, estimate_columns
from nestling.report.verdicts import state_line

__all__ = ["write_comparison"]


def write_comparison(folders: Sequence[Path], out: Path, *, png: bool = False) -> Path:
    """Write the comparison page `out`; its folder also gets `figures/` and `runs.csv`.

    Raises `StoreError` when a run cannot be read or the page cannot be written.
    """
    runs, differences = compare_runs(folders)
    write_atomic(out.parent / "runs.csv", _table(runs).csv().encode())
    figures = compare_all(runs, differences)
    write_figures(out.parent, figures, png=png)
    page = (
        environment("nestling.report")
        .get_template("compare.html")
        .render(
            runs=runs,
            states=[state_line(run.data) for run in runs],
            differences=differences,
            settings=differing_settings(runs),
            figures=figures,
            pictures={figure.name: Markup(figure.inline) for figure in figures},  # noqa: S704 (ours)
            version=__version__,
        )
    )
    write_atomic(out, page.encode("utf-8", "replace"))
    return out


def _table(runs: Sequence[Compared]) -> Table:
    names = ("untrained", "final", "best", "measured_gain", "held_out", "held_out_gain")
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        head, data = run.data.headline, run.data
        cells = [cell for name in names for cell in estimate_cells(getattr(head, name))]
        p_value = head.held_out_gain.p_value if head.held_out_gain else None
        rows.append(
            (run.label, len(data.steps), len(data.episodes), *cells, p_value, head.no_op, data.usd)
        )
    columns = [column for name in names for column in estimate_columns(name)]
    return Table(
        columns=("run", "steps", "episodes", *columns, "held_out_p", "no_op", "usd"), rows=rows
    )
