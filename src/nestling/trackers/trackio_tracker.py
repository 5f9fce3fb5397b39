"""Trackio: local files and a local dashboard. TRACKIO_DIR says where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trackio

from nestling.trackers.glossary import STEP
from nestling.trackers.tracker import Tracked, Tracker

__all__ = ["start"]


def start(run: Tracked) -> Tracker:
    """A run of this name and id, or the one that is there already."""
    opened = trackio.init(
        project=run.project,
        name=f"{run.name}-{run.run_id}",
        config=dict(run.config),
        resume="allow",
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
    return _Trackio(opened)


class _Trackio:
    def __init__(self, run: Any) -> None:  # noqa: ANN401 (trackio's own class)
        self._run = run

    def log(self, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._run.log(dict(values), step=int(values[STEP]))

    def close(self) -> None:
        """See `Tracker.close`."""
        self._run.finish()
