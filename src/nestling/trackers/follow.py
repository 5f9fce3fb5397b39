"""Tell trackers what a run does; they are guests, and none of them may end it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nestling.outer.step_report import StepReport
from nestling.outer.store_log import step_reports, sweeps
from nestling.outer.sweep_report import Sweep
from nestling.store import RunStore
from nestling.trackers.glossary import step_metrics, sweep_metrics
from nestling.trackers.tracker import Tracked, Tracker, TrackerKind, open_tracker

__all__ = ["Follower", "following", "send_recorded", "tracked"]

logger = logging.getLogger(__name__)

_PROJECT = "nestling"


def tracked(folder: Path, name: str, config: Mapping[str, Any], project: str = _PROJECT) -> Tracked:
    """A run as trackers know it; its id comes from where it is, so a resumed run keeps it."""
    place = str(folder.resolve()).encode()
    return Tracked(
        project=project,
        name=name,
        run_id=hashlib.sha256(place).hexdigest()[:12],
        config=config,
        folder=folder / "trackers",
    )


@contextmanager
def following(kinds: Sequence[TrackerKind], run: Tracked) -> Iterator[Follower]:
    """Trackers that are open inside the block; raises `ConfigError` when one is not installed."""
    follower = Follower()
    try:
        for kind in dict.fromkeys(kinds):
            follower.add(kind, open_tracker(kind, run))
        yield follower
    finally:
        follower.close()


def send_recorded(store: RunStore, follower: Follower) -> int:
    """Send every step and sweep that a run has recorded; returns the number of steps."""
    reports, found = step_reports(store), sweeps(store)
    if 0 in found:
        follower.on_sweep(0, found[0])
    for report in reports:
        follower.on_step(report)
        if report.step in found:
            follower.on_sweep(report.step, found[report.step])
    return len(reports)


class Follower:
    """Hands a run's steps and sweeps to its trackers; one that fails is left out from then on."""

    def __init__(self) -> None:
        self._trackers: dict[str, Tracker] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Trackers that still take part."""
        return tuple(self._trackers)

    def add(self, kind: str, tracker: Tracker) -> None:
        """One more."""
        self._trackers[kind] = tracker

    def on_step(self, report: StepReport) -> None:
        """One outer step is committed."""
        self._log(step_metrics(report))

    def on_sweep(self, step: int, sweep: Sweep) -> None:
        """A sweep is done."""
        self._log(sweep_metrics(step, sweep))

    def close(self) -> None:
        """Let each write out what it holds; may be called twice."""
        while self._trackers:
            kind, tracker = self._trackers.popitem()
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001 (see `_log`)
                logger.warning("tracker %s could not be closed: %s", kind, error)

    def _log(self, values: Mapping[str, float]) -> None:
        for kind, tracker in tuple(self._trackers.items()):
            try:
                tracker.log(values)
            except Exception as error:  # noqa: BLE001 (whatever a vendor raises must not end the run)
                logger.warning("tracker %s failed and is left out from now on: %s", kind, error)
                del self._trackers[kind]
