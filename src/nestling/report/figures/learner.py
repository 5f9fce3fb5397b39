"""How the learner is doing, and how fast the run goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nestling.report.figures.drawing import (
    SERIES,
    Drawing,
    curve,
    drawing,
    panels,
    steps_axis,
)
from nestling.report.figures.measures import step_numbers
from nestling.report.run_data import RunData, StepRow
from nestling.report.table import Cell, Table

__all__ = ["health", "pace"]

_Get = Callable[[StepRow], float | None]

_HEALTH: tuple[tuple[str, dict[str, _Get]], ...] = (
    (
        "KL divergence",
        {
            "kl_sampler": lambda row: row.report.update.kl_sampler if row.report.update else None,
            "kl_initial": lambda row: row.report.update.kl_initial if row.report.update else None,
        },
    ),
    (
        "entropy (mean NLL)",
        {"nll": lambda row: row.report.update.nll if row.report.update else None},
    ),
    (
        "gradient norm",
        {"grad_norm": lambda row: row.report.update.grad_norm if row.report.update else None},
    ),
    (
        "staleness (steps)",
        {
            "staleness_mean": lambda row: row.report.staleness_mean,
            "staleness_max": lambda row: float(row.report.staleness_max),
        },
    ),
)
_PACE: tuple[tuple[str, dict[str, _Get]], ...] = (
    (
        "seconds",
        {
            "step_s": lambda row: row.report.step_s,
            "train_s": lambda row: row.report.train_s,
            "episode_s": lambda row: row.episode_s,
        },
    ),
    (
        "per episode",
        {
            "tokens": lambda row: (
                row.report.agent_tokens / row.report.episodes if row.report.episodes else None
            )
        },
    ),
    ("submissions per episode", {"attempts": lambda row: row.attempts}),
    (
        "groups left out",
        {
            "constant": lambda row: float(row.report.groups.constant),
            "short": lambda row: float(row.report.groups.short),
            "dropped": lambda row: float(row.report.groups.dropped),
        },
    ),
)
_LABELS = {
    "kl_sampler": "from sampler",
    "kl_initial": "from initial",
    "staleness_mean": "mean",
    "staleness_max": "max",
    "step_s": "step",
    "train_s": "update",
    "episode_s": "episode",
    "tokens": "sampled tokens",
}


def health(data: RunData) -> Drawing:
    """KL, entropy, gradient norm, staleness."""
    skipped = sum(row.report.skipped for row in data.steps)
    return _grid(
        data,
        _HEALTH,
        name="learner",
        title="Health of the learner",
        caption="KL: estimated from sampled tokens, to the policy that sampled them and to the "
        "initial policy. NLL of sampled tokens estimates the entropy. Gradient norm before "
        f"clipping. {skipped} of {len(data.steps)} steps made no update.",
    )


def pace(data: RunData) -> Drawing:
    """Time, tokens, submissions, groups left out."""
    return _grid(
        data,
        _PACE,
        name="pace",
        title="Time, tokens and what was left out",
        caption="Wall-clock seconds of a step, of its update and of an episode; tokens the agent "
        "sampled; submissions; groups without a lesson (constant reward, too few episodes, stale).",
    )


def _grid(
    data: RunData,
    plots: Sequence[tuple[str, dict[str, _Get]]],
    *,
    name: str,
    title: str,
    caption: str,
) -> Drawing:
    steps = step_numbers(data)
    getters = {column: get for _, lines in plots for column, get in lines.items()}
    with panels(2, 2, height_in=4.4, top_in=0.12) as (canvas, all_axes):
        for axes, (ylabel, lines) in zip(all_axes, plots, strict=True):
            for (column, get), look in zip(lines.items(), SERIES, strict=False):
                values = [get(row) for row in data.steps]
                curve(axes, steps, values, _LABELS.get(column, column), look)
            if not axes.get_lines():
                axes.text(0.5, 0.5, "not reported", ha="center", transform=axes.transAxes)
            elif len(lines) > 1 or ylabel == "per episode":
                axes.legend(loc="best")
            axes.set_ylabel(ylabel)
            if ylabel != "KL divergence":
                # All others are counts, times and norms; an estimated KL may be below 0.
                axes.set_ylim(bottom=0)
            steps_axis(axes, steps)
        rows: list[tuple[Cell, ...]] = [
            (row.step, *(get(row) for get in getters.values())) for row in data.steps
        ]
        return drawing(canvas, name, title, caption, Table(columns=("step", *getters), rows=rows))
