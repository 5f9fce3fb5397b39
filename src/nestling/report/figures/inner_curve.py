"""The training curve of one job."""

from __future__ import annotations

from collections.abc import Sequence

from nestling.jobs.outcome import StepRecord
from nestling.report.figures.drawing import SERIES, Drawing, drawing, panels, steps_axis
from nestling.report.table import Cell, Table

__all__ = ["inner_curve"]


def inner_curve(records: Sequence[StepRecord], name: str) -> Drawing:
    """The job's own reward by training step, mean and spread over the batch."""
    steps = [one.step for one in records]
    means = [one.reward_mean for one in records]
    look = SERIES[0]
    with panels(height_in=2.0, top_in=0.12) as (canvas, [axes]):
        axes.plot(steps, means, color=look.color, marker=look.marker)
        axes.fill_between(
            steps,
            [one.reward_mean - one.reward_std for one in records],
            [one.reward_mean + one.reward_std for one in records],
            color=look.color,
            alpha=0.15,
            linewidth=0,
        )
        axes.set_ylabel("job's own reward")
        steps_axis(axes, steps, "training step of the small model")
        rows: list[tuple[Cell, ...]] = [
            (
                one.step,
                one.reward_mean,
                one.reward_std,
                one.loss,
                one.grad_norm,
                one.kl,
                one.learning_rate,
                one.trained_groups,
                one.rollout_tokens,
                one.cpu_s,
            )
            for one in records
        ]
        columns = ("step", "reward_mean", "reward_std", "loss", "grad_norm", "kl")
        return drawing(
            canvas,
            name,
            "Training curve of the job",
            "Mean of the rubric that the agent wrote, not the hidden score; band: one standard "
            "deviation over rollouts.",
            Table(
                columns=(*columns, "learning_rate", "trained_groups", "rollout_tokens", "cpu_s"),
                rows=rows,
            ),
        )
