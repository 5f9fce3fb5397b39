"""Several runs in one picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from nestling.outer.stats import Estimate
from nestling.report.compare import Compared, Difference
from nestling.report.figures.drawing import (
    BLUE,
    GREY,
    HEIGHT_IN,
    SERIES,
    Drawing,
    band,
    drawing,
    intervals,
    label_room_in,
    legend,
    panels,
    steps_axis,
)
from nestling.report.run_data import StepRow
from nestling.report.table import Cell, Table, estimate_cells, estimate_columns

__all__ = ["compare_all"]

_Get = Callable[[StepRow], Estimate | None]
_BANDS = "Bands: 95 % intervals over the groups of a step; they say nothing about another seed."


def compare_all(runs: Sequence[Compared], differences: Sequence[Difference]) -> list[Drawing]:
    """Figures in reading order; one without a single number is left out."""
    return list(_drawn(runs, differences))


def _drawn(runs: Sequence[Compared], differences: Sequence[Difference]) -> Iterator[Drawing]:
    if any(run.data.steps for run in runs):
        yield _curves(runs, _reward, "compare_reward", "Reward", "reward")
        yield _curves(runs, _uplift, "compare_uplift", "Uplift", "post − best_pre", zero=True)
        yield _curves(runs, lambda row: row.validity, "compare_validity", "Valid jobs", "share")
        yield _curves(
            runs, lambda row: row.job_success, "compare_jobs", "Accepted jobs that trained", "share"
        )
    if any(one.difference for one in differences):
        yield _differences(differences)


def _curves(
    runs: Sequence[Compared], get: _Get, name: str, title: str, ylabel: str, *, zero: bool = False
) -> Drawing:
    rows: list[tuple[Cell, ...]] = []
    with panels() as (canvas, [axes]):
        for index, run in enumerate(runs):
            steps = [row.step for row in run.data.steps]
            values = [get(row) for row in run.data.steps]
            band(axes, steps, values, run.label, SERIES[index % len(SERIES)])
            rows += [
                (run.label, step, *estimate_cells(value))
                for step, value in zip(steps, values, strict=True)
            ]
        if zero:
            axes.axhline(0.0, color=GREY, linewidth=1.2, linestyle="--")
        axes.set_ylabel(ylabel)
        steps_axis(axes, [row.step for run in runs for row in run.data.steps])
        legend(axes)
        return drawing(
            canvas,
            name,
            title,
            f"By outer step of each run. {_BANDS}",
            Table(columns=("run", "step", *estimate_columns(name)), rows=rows),
        )


def _differences(differences: Sequence[Difference]) -> Drawing:
    known = [(one, one.difference) for one in differences if one.difference is not None]
    labels = [f"{one.first} − {one.second}, {one.families} (n = {found.n})" for one, found in known]
    height = max(HEIGHT_IN * 0.6, 0.9 + 0.28 * len(known))
    left_in = min(4.0, label_room_in(labels))
    with panels(height_in=height, left_in=left_in, top_in=0.12) as (canvas, [axes]):
        marks = zip(labels, known, strict=True)
        intervals(axes, [(label, found, BLUE) for label, (_, found) in marks])
        axes.set_xlabel("difference of the trained agents' reward")
        rows: list[tuple[Cell, ...]] = [
            (one.first, one.second, one.families, *estimate_cells(found), found.p_value)
            for one, found in known
        ]
        columns = ("first", "second", "families", *estimate_columns("difference"), "p_value")
        return drawing(
            canvas,
            "compare_differences",
            "Differences between the trained agents",
            "The newest measured checkpoint of each run on the same tasks and seeds, paired by "
            "task, 95 % intervals.",
            Table(columns=columns, rows=rows),
        )


def _reward(row: StepRow) -> Estimate | None:
    return row.report.summary.reward if row.report.summary else None


def _uplift(row: StepRow) -> Estimate | None:
    return row.report.summary.uplift if row.report.summary else None
