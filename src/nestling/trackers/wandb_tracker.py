"""Weights & Biases. Keys, host and mode come from its own settings, such as WANDB_MODE=offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb

from nestling.trackers.glossary import STEP
from nestling.trackers.tracker import Tracked, Tracker

__all__ = ["start"]


def start(run: Tracked) -> Tracker:
    """A run of this name, or the one with this id if there is one."""
    run.folder.mkdir(parents=True, exist_ok=True)
    opened = wandb.init(
        project=run.project,
        name=run.name,
        id=run.run_id,
        resume="allow",
        config=dict(run.config),
        dir=str(run.folder),
    )
    # Sweeps end after later steps began; with a step of its own W&B would drop them.
    opened.define_metric("*", step_metric=STEP)
    return _Wandb(opened)


class _Wandb:
    def __init__(self, run: Any) -> None:  # noqa: ANN401 (wandb's own class)
        self._run = run

    def log(self, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._run.log(dict(values))

    def close(self) -> None:
        """See `Tracker.close`."""
        self._run.finish()
