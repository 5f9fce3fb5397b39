"""Reward, its parts, and what the jobs achieved, over outer steps."""

from __future__ import annotations

import math

from nestling.outer.stats import Estimate
from nestling.report.estimates import by_group, estimate
from nestling.report.figures.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
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
from nestling.report.figures.measures import (
    BANDS,
    FIRST_TRY,
    JOB_SUCCESS,
    LINES,
    POST,
    REWARD,
    SCORED_QUALITY,
    TERMS,
    UPLIFT,
    VALIDITY,
    Measure,
    draw_lines,
    draw_measure,
    measure_table,
    step_numbers,
)
from nestling.report.levels import family_level
from nestling.report.run_data import RunData
from nestling.report.table import Cell, Table, estimate_cells, estimate_columns

__all__ = ["decomposition", "families", "reward", "scores", "terms", "uplift", "validity"]


_PARTS = (
    ("validation", BLUE),
    ("quality", GREEN),
    ("speed", ORANGE),
    ("no_submission", PURPLE),
)


def reward(data: RunData) -> Drawing:
    """Mean reward with the reference lines."""
    steps = step_numbers(data)
    formula = [row.no_op_formula for row in data.steps]
    with panels() as (canvas, [axes]):
        drawn = draw_measure(axes, data, REWARD)
        measured = any("noop" in row.references for row in data.steps)
        if not measured:
            curve(axes, steps, formula, "no-op job (formula)", Series(VERMILION, "--", ""))
        axes.set_ylabel("reward")
        steps_axis(axes, steps)
        legend(axes)
        about = LINES if drawn else "No reference policy was measured on these families yet."
        if not measured and any(one is not None for one in formula):
            about += " No-op line: what a job earns by the formula that is valid at once and changes nothing."
        table = measure_table(data, [REWARD])
        table = Table(
            columns=(*table.columns, "no_op_formula"),
            rows=[(*cells, value) for cells, value in zip(table.rows, formula, strict=True)],
        )
        return drawing(
            canvas,
            "reward",
            "Reward of the agent",
            f"Mean reward per outer step, {_n_range(data)}. {BANDS} {about}",
            table,
        )


def decomposition(data: RunData) -> Drawing:
    """What the mean reward is paid for."""
    steps = step_numbers(data)
    parts = [row.parts for row in data.steps]
    with panels() as (canvas, [axes]):
        tops, bottoms = [0.0] * len(steps), [0.0] * len(steps)
        for name, color in _PARTS:
            values = [getattr(one, name) if one else 0.0 for one in parts]
            starts = [
                top if value >= 0 else bottom
                for value, top, bottom in zip(values, tops, bottoms, strict=True)
            ]
            label = name.replace("_", " ")
            axes.bar(steps, values, 0.92, bottom=starts, color=color, alpha=0.75, label=label)
            tops = [top + max(value, 0.0) for value, top in zip(values, tops, strict=True)]
            bottoms = [low + min(value, 0.0) for value, low in zip(values, bottoms, strict=True)]
        means = [one.mean if (one := REWARD.of_step(row)) else None for row in data.steps]
        curve(axes, steps, means, "reward", Series(VERMILION, "-", "o"))
        axes.set_ylabel("reward, by what it is paid for")
        steps_axis(axes, steps)
        legend(axes)
        rows: list[tuple[Cell, ...]] = [
            (step, *(getattr(one, name) if one else None for name, _ in _PARTS), mean)
            for step, one, mean in zip(steps, parts, means, strict=True)
        ]
        return drawing(
            canvas,
            "decomposition",
            "What the reward is paid for",
            f"Weighted parts of the mean reward ({_weights(data)}); bars above and below 0 add up "
            "to it. No submission: the fixed price of an episode without a readable one.",
            Table(columns=("step", *(name for name, _ in _PARTS), "reward"), rows=rows),
        )


def terms(data: RunData) -> Drawing:
    """The three terms of the reward."""
    return _panels(
        data,
        TERMS,
        name="terms",
        title="The three terms of the reward",
        caption=f"Each term before its weight ({_weights(data)}). {BANDS} {LINES}",
    )


def validity(data: RunData) -> Drawing:
    """Process reliability, and what is left when it is taken out."""
    return _panels(
        data,
        (FIRST_TRY, VALIDITY, JOB_SUCCESS, SCORED_QUALITY),
        name="validity",
        title="Two rungs: valid and successful jobs, then better ones",
        caption="Share of episodes with an accepted first submission and with any accepted one; "
        "share of accepted jobs that trained and were scored; quality term of the scored jobs "
        f"alone. {BANDS} {LINES}",
    )


def scores(data: RunData) -> Drawing:
    """Trained score beside the best untrained one."""
    steps = step_numbers(data)
    with panels() as (canvas, [axes]):
        draw_measure(axes, data, POST, label="post")
        best = [row.best_pre for row in data.steps]
        band(axes, steps, best, "best_pre", SERIES[1])
        axes.set_ylabel(POST.label)
        steps_axis(axes, steps)
        legend(axes)
        table = measure_table(
            data,
            [POST, Measure("best_pre", "best_pre", lambda row: row.best_pre, lambda _: None)],
        )
        return drawing(
            canvas,
            "scores",
            "Hidden score of the trained models",
            "Trained (post) and best untrained (best_pre), mean over scored jobs; both are of the same hidden items and sampling seeds, "
            f"so what counts is the gap (next figure). {BANDS} {LINES}",
            table,
        )


def uplift(data: RunData) -> Drawing:
    """Paired gain of training."""
    steps = step_numbers(data)
    with panels() as (canvas, [axes]):
        draw_measure(axes, data, UPLIFT)
        axes.axhline(0.0, color=GREY, linewidth=0.8)
        axes.set_ylabel(UPLIFT.label)
        steps_axis(axes, steps)
        legend(axes)
        return drawing(
            canvas,
            "uplift",
            "Uplift over the best untrained base",
            "Mean of post − best_pre over scored jobs, paired by hidden item. A job that changes "
            f"nothing has uplift 0. {BANDS} {LINES}",
            measure_table(data, [UPLIFT]),
        )


def families(data: RunData) -> Drawing:
    """Reward by family, a panel each."""
    steps = step_numbers(data)
    names = sorted({name for row in data.steps for name in row.families})
    found = {name: _by_step(data, name) for name in names}
    columns = min(3, max(1, len(names)))
    num_rows = math.ceil(len(names) / columns) or 1
    height_in = 0.6 + 1.9 * num_rows
    with panels(num_rows, columns, height_in=height_in) as (canvas, all_axes):
        for axes, name in zip(all_axes, names, strict=False):
            band(axes, steps, found[name], "agent", SERIES[0])
            flat = {
                arm: [level] * len(steps)
                for arm, level in family_level(data, REWARD.of_episode, "reward", name).items()
            }
            draw_lines(axes, steps, flat)
            axes.set_ylabel(name)
            steps_axis(axes, steps, "" if len(names) > 1 else "outer step")
        for axes in all_axes[len(names) :]:
            axes.set_axis_off()
        if names:
            legend(all_axes[0])
        rows: list[tuple[Cell, ...]] = [
            (step, *(cell for name in names for cell in estimate_cells(found[name][index])))
            for index, step in enumerate(steps)
        ]
        estimates = [column for name in names for column in estimate_columns(name)]
        return drawing(
            canvas,
            "families",
            "Reward by family",
            "Mean reward of each family's episodes by outer step; few episodes each, so single "
            f"points are noisy (n in the CSV). {BANDS} Lines: reference policies on that family.",
            Table(columns=("step", *estimates), rows=rows),
        )


def _by_step(data: RunData, family: str) -> list[Estimate | None]:
    played = [one for one in data.train_episodes if one.family == family]
    return [
        estimate(
            by_group([one for one in played if one.step == row.step]),
            REWARD.of_episode,
            "family",
            family,
            row.step,
        )
        for row in data.steps
    ]


def _panels(
    data: RunData, measures: tuple[Measure, ...], *, name: str, title: str, caption: str
) -> Drawing:
    """A panel for each measure; three stand in one row, more in rows of two."""
    columns = 3 if len(measures) == 3 else 2
    num_rows = math.ceil(len(measures) / columns)
    height_in = 2.7 if num_rows == 1 else 0.6 + 1.9 * num_rows
    with panels(num_rows, columns, height_in=height_in) as (canvas, all_axes):
        for axes, measure in zip(all_axes, measures, strict=True):
            draw_measure(axes, data, measure)
            axes.set_ylabel(measure.label)
            steps_axis(axes, step_numbers(data), "outer step" if num_rows == 1 else "")
        legend(all_axes[0])
        return drawing(canvas, name, title, caption, measure_table(data, measures))


def _weights(data: RunData) -> str:
    weights = data.weights
    return (
        f"{weights.validation:g} validation, {weights.quality:g} quality, {weights.speed:g} speed"
    )


def _n_range(data: RunData) -> str:
    counts = [row.report.episodes for row in data.steps]
    low, high = min(counts), max(counts)
    return f"n = {low} episodes a step" if low == high else f"n = {low} to {high} episodes a step"
