"""The held-out families: reward of each checkpoint beside the reference arms, and paired gains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes

from nestling.outer.heldout import UNTRAINED
from nestling.outer.stats import Estimate
from nestling.outer.sweep_report import ALL_FAMILIES, ArmResult
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
from nestling.report.figures.measures import OTHER_LOOK, REFERENCE_LOOKS
from nestling.report.headline import held_out_scope, last_checkpoint
from nestling.report.reference_rows import is_checkpoint
from nestling.report.run_data import RunData
from nestling.report.table import Cell, Table, estimate_cells, estimate_columns

__all__ = ["gains", "rewards"]


def rewards(data: RunData) -> Drawing:
    """Reward on the held-out families by checkpoint."""
    agent, arms = _arms(data)
    points = sorted(agent.items())
    with panels() as (canvas, [axes]):
        steps = [step for step, _ in points]
        shown = [one.summary.reward if one.summary else None for _, one in points]
        band(axes, steps, shown, "agent", SERIES[0])
        _whiskers(axes, steps, shown)
        for name, one in arms.items():
            if one.summary is None:
                continue
            look = REFERENCE_LOOKS.get(name, OTHER_LOOK)
            label = f"{name} (n = {one.summary.n})"
            mean = one.summary.reward
            axes.axhline(
                mean.mean, color=look.color, linestyle=look.dash, linewidth=1.4, label=label
            )
            if mean.lo is not None and mean.hi is not None:
                axes.axhspan(mean.lo, mean.hi, color=look.color, alpha=0.08, linewidth=0)
        axes.set_ylabel("reward")
        steps_axis(axes, steps, "checkpoint after outer step")
        legend(axes)
        return drawing(
            canvas,
            "held_out",
            "Held-out reward",
            f"Families that are never trained on ({_families(data)}): mean reward with 95 % "
            "intervals. Every arm plays the same tasks and seeds, so compare by the paired "
            "differences, not by overlap of these intervals. Step 0 is the untrained agent.",
            _table(data),
        )


def gains(data: RunData) -> Drawing:
    """Paired differences to the untrained agent."""
    rows = list(_gains(data))
    height = max(HEIGHT_IN * 0.6, 0.9 + 0.28 * len(rows))
    marks = [
        (_gain_label(name, gain), gain, BLUE if is_checkpoint(name) else GREY)
        for name, _, gain in rows
    ]
    left_in = label_room_in([label for label, _, _ in marks])
    with panels(height_in=height, left_in=left_in, top_in=0.12) as (canvas, [axes]):
        intervals(axes, marks)
        axes.set_xlabel("reward − reward of the untrained agent")
        table = Table(
            columns=("arm", "step", *estimate_columns("difference"), "p_value"),
            rows=[(name, step, *estimate_cells(gain), gain.p_value) for name, step, gain in rows],
        )
        return drawing(
            canvas,
            "held_out_gain",
            "Held-out gain over the untrained agent",
            "Mean paired difference with a 95 % bootstrap interval; p: two-sided sign-flip "
            "permutation test over pairs, not corrected for the number of checkpoints looked at.",
            table,
        )


def _arms(data: RunData) -> tuple[dict[int, ArmResult], dict[str, ArmResult]]:
    """The agent by step, and the newest result of every other arm."""
    agent: dict[int, ArmResult] = {}
    arms: dict[str, ArmResult] = {}
    for one in _results(data):
        if one.arm == UNTRAINED:
            agent[0] = one
        elif is_checkpoint(one.arm):
            agent[one.step] = one
        else:
            arms[one.arm] = one
    return agent, arms


def _results(data: RunData) -> Iterator[ArmResult]:
    for sweep in data.sweeps.values():
        scope = held_out_scope(sweep, data.training_families) or ALL_FAMILIES
        for one in sweep.results:
            if one.family == scope:
                yield one


def _gains(data: RunData) -> Iterator[tuple[str, int, Estimate]]:
    """Each checkpoint in its own sweep, and the reference arms in the newest one."""
    newest = max(data.sweeps)
    for step, sweep in sorted(data.sweeps.items()):
        scope = held_out_scope(sweep, data.training_families) or ALL_FAMILIES
        checkpoint = last_checkpoint(sweep)
        for one in sweep.comparisons:
            if (one.against, one.family) != (UNTRAINED, scope):
                continue
            if one.arm == checkpoint or step == newest:
                yield one.arm, step if one.arm == checkpoint else 0, one.difference


def _gain_label(name: str, gain: Estimate) -> str:
    shown = f"step {int(name.removeprefix('step-'))}" if is_checkpoint(name) else name
    p = "" if gain.p_value is None else f", p = {gain.p_value:.2g}"
    return f"{shown} (n = {gain.n}{p})"


def _whiskers(axes: Axes, steps: Sequence[int], shown: Sequence[Estimate | None]) -> None:
    """Intervals as bars: checkpoints are few and far apart."""
    for step, one in zip(steps, shown, strict=True):
        if one is not None and one.lo is not None and one.hi is not None:
            axes.vlines([step], [one.lo], [one.hi], color=SERIES[0].color, linewidth=1.2)


def _families(data: RunData) -> str:
    names = data.headline.held_out_families
    return ", ".join(names) if names else "all families of the sweep"


def _table(data: RunData) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for step, sweep in sorted(data.sweeps.items()):
        for one in sweep.results:
            summary = one.summary
            rows.append(
                (
                    step,
                    one.arm,
                    one.family,
                    *estimate_cells(summary.reward if summary else None),
                    summary.validity if summary else None,
                    summary.job_success if summary else None,
                    summary.reward_worst if summary else None,
                    one.dead,
                )
            )
    columns = ("sweep_step", "arm", "family", *estimate_columns("reward"))
    return Table(columns=(*columns, "validity", "job_success", "worst", "dead"), rows=rows)
