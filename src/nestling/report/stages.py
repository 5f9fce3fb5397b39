"""A run's gain stage by stage: did reliability come first and better models later?"""

from __future__ import annotations

from dataclasses import dataclass

from nestling.report.decomposition import gain_account
from nestling.report.estimates import by_group
from nestling.report.run_data import GainAccount, RunData
from nestling.report.windows import window

__all__ = ["Stage", "gain_by_stage"]

_STAGES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What changed between two windows of training steps."""

    label: str
    account: GainAccount


def gain_by_stage(data: RunData) -> list[Stage]:
    """Each third of the run, then the whole; the whole alone where a third is no wider than a window.

    A window has as many steps as it takes to see every training family. The first is that of the
    untrained weights; each stage ends with the window that ends there. Totals of the stages add up
    to that of the whole, as do their parts, success and quality only together.
    """
    whole = data.headline.account
    if whole is None:
        return []
    width, num_steps = data.headline.window_steps, len(data.steps)
    found: list[Stage] = []
    if num_steps // _STAGES > width:
        before, start = window(data, "untrained"), 0
        for number in range(1, _STAGES + 1):
            end = num_steps * number // _STAGES
            numbers = {row.step for row in data.steps[end - width : end]}
            after = [one for one in data.train_episodes if one.step in numbers]
            account = gain_account(by_group(before), by_group(after), data.weights, "stage", number)
            if account is None:
                return [Stage(label="whole run", account=whole)]
            first, last = data.steps[start].step, data.steps[end - 1].step
            found.append(Stage(label=f"steps {first} to {last}", account=account))
            before, start = after, end
    return [*found, Stage(label="whole run", account=whole)]
