"""The first and the last training episodes of a run, as the headline counts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from nestling.outer.stats import Estimate
from nestling.report.estimates import by_group, estimate
from nestling.report.run_data import EpisodeRow, RunData

__all__ = ["Window", "window", "window_mean"]

Window = Literal["untrained", "final"]
"""untrained: played by the weights before the first update; final: of the last steps, as many as it
takes to see every training family."""


def window(data: RunData, which: Window) -> Sequence[EpisodeRow]:
    """Its episodes."""
    if which == "untrained":
        return [one for one in data.train_episodes if one.version == 0]
    steps = {row.step for row in data.steps[-data.headline.window_steps :]}
    return [one for one in data.train_episodes if one.step in steps]


def window_mean(
    data: RunData, which: Window, value: Callable[[EpisodeRow], float | None], name: str
) -> Estimate | None:
    """Mean over its episodes that have a value; `name` picks the random stream."""
    return estimate(by_group(window(data, which)), value, "window-mean", which, name)
