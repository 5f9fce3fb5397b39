"""Several runs in one picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from nestling.report.figures.measures import (
    JOB_SUCCESS,
    REWARD,
    UPLIFT,
    VALIDITY,
    Measure,
    draw_lines,
    step_numbers,
)
from nestling.report.levels import levels
from nestling.report.table import Cell, Table, estimate_cells, estimate_columns

__all__ = ["compare_all"]

_BANDS = "Bands: 95 % intervals over the groups of a step; they say nothing about another seed."


def compare_all(runs: Sequence[Compared], differences: Sequence[Difference]) -> list[Drawing]:
    """Figures in reading order; one without a single number is left out."""
    return list(_drawn(runs, differences))


def _drawn(runs: Sequence[Compared], differences: Sequence[Difference]) -> Iterator[Drawing]:
    if any(run.data.steps for run in runs):
        yield _curves(runs, REWARD, "compare_reward", "Reward")
        yield _curves(runs, UPLIFT, "compare_uplift", "Uplift", zero=True)
        yield _curves(runs, VALIDITY, "compare_validity", "Valid jobs")
        yield _curves(runs, JOB_SUCCESS, "compare_jobs", "Accepted jobs that end scored")
    if any(one.difference for one in differences):
        yield _differences(differences)


def _curves(
    runs: Sequence[Compared], measure: Measure, name: str, title: str, *, zero: bool = False
) -> Drawing:
    rows: list[tuple[Cell, ...]] = []
    with panels() as (canvas, [axes]):
        for index, run in enumerate(runs):
            steps = step_numbers(run.data)
            values = [measure.of_step(row) for row in run.data.steps]
            band(axes, steps, values, run.label, SERIES[index % len(SERIES)])
            rows += [
                (run.label, step, *estimate_cells(value))
                for step, value in zip(steps, values, strict=True)
            ]
        first = runs[0]
        found = levels(first.data, measure.of_episode, measure.name)
        draw_lines(axes, step_numbers(first.data), found)
        about = f" Lines: reference policies as {first.label} measured them." if found else ""
        if zero:
            axes.axhline(0.0, color=GREY, linewidth=0.8)
        axes.set_ylabel(measure.label)
        steps_axis(axes, [row.step for run in runs for row in run.data.steps])
        legend(axes)
        return drawing(
            canvas,
            name,
            title,
            f"By outer step of each run. {_BANDS}{about}",
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
