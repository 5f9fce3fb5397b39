"""A measure over outer steps: the agent's curve, and the reference policies' lines beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from nestling.outer.stats import Estimate
from nestling.report.figures.drawing import GREEN, GREY, ORANGE, SERIES, Series, band, curve
from nestling.report.levels import levels
from nestling.report.run_data import EpisodeRow, RunData, StepRow
from nestling.report.table import Cell, Table, estimate_cells, estimate_columns

__all__ = [
    "BANDS",
    "FIRST_TRY",
    "JOB_SUCCESS",
    "LINES",
    "OTHER_LOOK",
    "POST",
    "REFERENCE_LOOKS",
    "REWARD",
    "SCORED_QUALITY",
    "TERMS",
    "UPLIFT",
    "VALIDITY",
    "Measure",
    "draw_lines",
    "draw_measure",
    "measure_table",
    "step_numbers",
]

BANDS = "Bands: 95 % intervals, bootstrap over groups (over episodes in a step with one group)."
LINES = (
    "Lines: reference policies measured on the same families, weighted like each step's episodes, "
    "with 95 % intervals over measured episodes."
)

REFERENCE_LOOKS: Mapping[str, Series] = {
    "noop": Series(GREY, "--", ""),
    "random": Series(ORANGE, ":", ""),
    "template": Series(GREEN, "-.", ""),
}
OTHER_LOOK = Series(GREY, (0, (1, 1, 3, 1)), "")


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of an episode, and its mean over a step with an interval."""

    name: str
    label: str
    of_step: Callable[[StepRow], Estimate | None]
    of_episode: Callable[[EpisodeRow], float | None]


def _reward_of(row: StepRow) -> Estimate | None:
    return row.report.summary.reward if row.report.summary else None


def _uplift_of(row: StepRow) -> Estimate | None:
    return row.report.summary.uplift if row.report.summary else None


REWARD = Measure("reward", "reward", _reward_of, lambda one: one.reward)
UPLIFT = Measure("uplift", "post − best_pre", _uplift_of, lambda one: one.uplift)
POST = Measure("post", "hidden score", lambda row: row.post, lambda one: one.post)
TERMS = (
    Measure("validation", "validation", lambda row: row.validation, lambda one: one.validation),
    Measure("quality", "quality", lambda row: row.quality, lambda one: one.quality),
    Measure("speed", "speed", lambda row: row.speed, lambda one: one.speed),
)
FIRST_TRY = Measure(
    "first_try",
    "valid at first try",
    lambda row: row.first_try,
    lambda one: float(one.valid_attempt == 1),
)
VALIDITY = Measure(
    "validity", "valid in the end", lambda row: row.validity, lambda one: float(one.is_valid)
)
JOB_SUCCESS = Measure(
    "job_success",
    "valid jobs that end scored",
    lambda row: row.job_success,
    lambda one: float(one.is_job_done) if one.is_valid else None,
)
SCORED_QUALITY = Measure(
    "scored_quality",
    "quality of scored jobs",
    lambda row: row.scored_quality,
    lambda one: one.quality if one.is_job_done else None,
)


def step_numbers(data: RunData) -> list[int]:
    """The x axis."""
    return [row.step for row in data.steps]


def draw_measure(
    axes: Axes, data: RunData, measure: Measure, *, label: str = "agent", look: Series = SERIES[0]
) -> bool:
    """The agent's band and every reference arm's; returns whether an arm had anything to draw."""
    band(axes, step_numbers(data), [measure.of_step(row) for row in data.steps], label, look)
    found = levels(data, measure.of_episode, measure.name)
    draw_lines(axes, step_numbers(data), found)
    return bool(found)


def draw_lines(
    axes: Axes, steps: Sequence[int], found: Mapping[str, Sequence[Estimate | None]]
) -> None:
    """Reference arms: one that does not change spans the axis."""
    for arm, line in found.items():
        look = REFERENCE_LOOKS.get(arm, OTHER_LOOK)
        known = [one for one in line if one is not None]
        if not known:
            continue
        if len(known) == len(line) and all(one == known[0] for one in known):
            level = known[0]
            axes.axhline(
                level.mean, color=look.color, linestyle=look.dash, linewidth=1.4, label=arm
            )
            if level.lo is not None and level.hi is not None:
                axes.axhspan(level.lo, level.hi, color=look.color, alpha=0.12, linewidth=0)
            continue
        curve(axes, steps, [one.mean if one else None for one in line], arm, look)
        ends = [
            (step, one.lo, one.hi)
            for step, one in zip(steps, line, strict=True)
            if one is not None and one.lo is not None and one.hi is not None
        ]
        if len(ends) > 1:
            xs, lows, highs = zip(*ends, strict=True)
            axes.fill_between(xs, lows, highs, color=look.color, alpha=0.12, linewidth=0)


def measure_table(data: RunData, measures: Sequence[Measure]) -> Table:
    """Each measure by step, of the agent and, as `MEASURE_ARM`, of every reference arm."""
    names: list[str] = []
    lines: list[Sequence[Estimate | None]] = []
    for measure in measures:
        names.append(measure.name)
        lines.append([measure.of_step(row) for row in data.steps])
        for arm, line in levels(data, measure.of_episode, measure.name).items():
            names.append(f"{measure.name}_{arm}")
            lines.append(line)
    columns = [column for name in names for column in estimate_columns(name)]
    rows: list[tuple[Cell, ...]] = [
        (row.step, *(cell for line in lines for cell in estimate_cells(line[index])))
        for index, row in enumerate(data.steps)
    ]
    return Table(columns=("step", *columns), rows=rows)
