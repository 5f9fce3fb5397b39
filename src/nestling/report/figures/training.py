"""Reward, its terms, and what the jobs achieved, over outer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes

from nestling.outer.stats import Estimate
from nestling.report.figures.drawing import (
    GREEN,
    GREY,
    ORANGE,
    SERIES,
    VERMILION,
    Drawing,
    Series,
    band,
    curve,
    drawing,
    legend,
    panels,
    steps_axis,
)
from nestling.report.run_data import RunData, StepRow
from nestling.report.table import Cell, Table, estimate_cells, estimate_columns

__all__ = [
    "families",
    "reward",
    "scores",
    "step_numbers",
    "step_table",
    "terms",
    "uplift",
    "validity",
]

_BANDS = "Bands: 95 % intervals, bootstrap over groups (over episodes in a step with one group)."

_LINES = {
    "noop": ("no-op job", Series(GREY, "--", "")),
    "random": ("random job", Series(ORANGE, ":", "")),
    "template": ("template job", Series(GREEN, "-.", "")),
}
_OTHER = Series(GREY, ":", "")

_Get = Callable[[StepRow], Estimate | None]


def step_numbers(data: RunData) -> list[int]:
    """The x axis."""
    return [row.step for row in data.steps]


def step_table(data: RunData, columns: dict[str, _Get]) -> Table:
    """Estimates by step."""
    names = [name for column in columns for name in estimate_columns(column)]
    rows: list[tuple[Cell, ...]] = [
        (row.step, *(cell for get in columns.values() for cell in estimate_cells(get(row))))
        for row in data.steps
    ]
    return Table(columns=("step", *names), rows=rows)


def reward(data: RunData) -> Drawing:
    """Mean reward with the reference lines."""
    steps = step_numbers(data)
    estimates = [_reward(row) for row in data.steps]
    with panels() as (canvas, [axes]):
        band(axes, steps, estimates, "agent", SERIES[0])
        arms = _reference_lines(axes, data)
        axes.set_ylabel("reward")
        steps_axis(axes, steps)
        legend(axes)
        table = step_table(data, {"reward": _reward})
        extra = ("no_op_formula", *arms)
        table = Table(
            columns=(*table.columns, *extra),
            rows=[
                (*cells, row.no_op_formula, *(row.references.get(arm) for arm in arms))
                for cells, row in zip(table.rows, data.steps, strict=True)
            ],
        )
        return drawing(
            canvas,
            "reward",
            "Reward of the agent",
            f"Mean reward per outer step, {_n_range(data)}. {_BANDS} {_about_lines(data, arms)}",
            table,
        )


def terms(data: RunData) -> Drawing:
    """The three terms of the reward."""
    columns: dict[str, _Get] = {
        "validation": lambda row: row.validation,
        "quality": lambda row: row.quality,
        "speed": lambda row: row.speed,
    }
    return _lines(
        data,
        columns,
        name="terms",
        title="The three terms of the reward",
        ylabel="term, before weighting",
        caption=f"Each term before its weight ({data.weights.validation:g} validation, "
        f"{data.weights.quality:g} quality, {data.weights.speed:g} speed). {_BANDS}",
    )


def validity(data: RunData) -> Drawing:
    """Process reliability."""
    columns: dict[str, _Get] = {
        "valid at first try": lambda row: row.first_try,
        "valid in the end": lambda row: row.validity,
        "job succeeded": lambda row: row.job_success,
    }
    return _lines(
        data,
        columns,
        name="validity",
        title="Valid submissions and job success",
        ylabel="share",
        caption="Share of episodes with an accepted first submission and with any accepted one; "
        f"share of accepted jobs that trained and were scored. {_BANDS}",
        limits=(-0.03, 1.03),
    )


def scores(data: RunData) -> Drawing:
    """Trained score beside the best untrained one."""
    columns: dict[str, _Get] = {
        "trained (post)": lambda row: row.post,
        "best untrained (best_pre)": lambda row: row.best_pre,
    }
    return _lines(
        data,
        columns,
        name="scores",
        title="Hidden score of the trained models",
        ylabel="hidden score",
        caption="Mean over scored jobs; both scores are of the same hidden items and sampling "
        f"seeds, so what counts is the gap (next figure). {_BANDS}",
    )


def uplift(data: RunData) -> Drawing:
    """Paired gain of training."""
    steps = step_numbers(data)
    with panels() as (canvas, [axes]):
        band(axes, steps, [_uplift(row) for row in data.steps], "uplift", SERIES[0])
        axes.axhline(0.0, color=GREY, linewidth=1.2, linestyle="--", label="no-op (0)")
        axes.set_ylabel("post − best_pre")
        steps_axis(axes, steps)
        legend(axes)
        return drawing(
            canvas,
            "uplift",
            "Uplift over the best untrained base",
            "Mean of post − best_pre over scored jobs, paired by hidden item. A job that changes "
            f"nothing has uplift 0. {_BANDS}",
            step_table(data, {"uplift": _uplift}),
        )


def families(data: RunData) -> Drawing:
    """Reward by family."""
    steps = step_numbers(data)
    names = sorted({name for row in data.steps for name in row.report.reward_by_family})
    with panels() as (canvas, [axes]):
        for index, name in enumerate(names):
            means = [row.report.reward_by_family.get(name) for row in data.steps]
            curve(axes, steps, means, name, SERIES[index % len(SERIES)])
        axes.set_ylabel("reward")
        steps_axis(axes, steps)
        legend(axes)
        rows: list[tuple[Cell, ...]] = [
            (
                row.step,
                *(
                    cell
                    for name in names
                    for cell in (row.report.reward_by_family.get(name), row.families.get(name, 0))
                ),
            )
            for row in data.steps
        ]
        columns = [column for name in names for column in (f"{name}_mean", f"{name}_n")]
        return drawing(
            canvas,
            "families",
            "Reward by family",
            "Mean reward of each family's episodes per step; few episodes each, so single points "
            "are noisy (n in the CSV).",
            Table(columns=("step", *columns), rows=rows),
        )


def _lines(
    data: RunData,
    columns: dict[str, _Get],
    *,
    name: str,
    title: str,
    ylabel: str,
    caption: str,
    limits: tuple[float, float] | None = None,
) -> Drawing:
    steps = step_numbers(data)
    with panels() as (canvas, [axes]):
        for (label, get), look in zip(columns.items(), SERIES, strict=False):
            band(axes, steps, [get(row) for row in data.steps], label, look)
        axes.set_ylabel(ylabel)
        if limits is not None:
            axes.set_ylim(*limits)
        steps_axis(axes, steps)
        legend(axes)
        return drawing(canvas, name, title, caption, step_table(data, columns))


def _reference_lines(axes: Axes, data: RunData) -> list[str]:
    """Draw each measured arm, and the no-op by formula where it was not measured."""
    steps = step_numbers(data)
    arms = sorted({arm for row in data.steps for arm in row.references})
    for arm in arms:
        label, look = _LINES.get(arm, (f"{arm} (measured)", _OTHER))
        _level(axes, steps, [row.references.get(arm) for row in data.steps], label, look)
    if "noop" not in arms:
        label, look = "no-op job (formula)", Series(VERMILION, "--", "")
        _level(axes, steps, [row.no_op_formula for row in data.steps], label, look)
    return arms


def _level(
    axes: Axes, steps: Sequence[int], values: Sequence[float | None], label: str, look: Series
) -> None:
    """A line that is meant to be flat; it spans the axis when it is."""
    known = [value for value in values if value is not None]
    if not known:
        return
    style: dict[str, Any] = {
        "color": look.color,
        "linestyle": look.dash,
        "linewidth": 1.4,
        "label": label,
    }
    if max(known) - min(known) < 1e-9:
        axes.axhline(known[0], **style)
    else:
        axes.plot(steps, [float("nan") if v is None else v for v in values], **style)


def _about_lines(data: RunData, arms: Sequence[str]) -> str:
    formula = any(row.no_op_formula is not None for row in data.steps)
    parts = []
    if arms:
        parts.append(
            f"Lines: reference policies ({', '.join(arms)}) measured on the same families, "
            f"weighted like each step's episodes."
        )
    if "noop" not in arms and formula:
        parts.append(
            "No-op line: what a job earns by the formula that is valid at once and changes nothing."
        )
    if not parts:
        parts.append("No reference line: nothing was measured or scored yet.")
    return " ".join(parts)


def _n_range(data: RunData) -> str:
    counts = [row.report.episodes for row in data.steps]
    low, high = min(counts), max(counts)
    return f"n = {low} episodes a step" if low == high else f"n = {low} to {high} episodes a step"


def _reward(row: StepRow) -> Estimate | None:
    return row.report.summary.reward if row.report.summary else None


def _uplift(row: StepRow) -> Estimate | None:
    return row.report.summary.uplift if row.report.summary else None
