"""TensorBoard event files in the run folder, written by tensorboardX, which needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping

from tensorboardX import SummaryWriter

from nestling.trackers.glossary import STEP
from nestling.trackers.tracker import Tracked, Tracker

__all__ = ["start"]


def start(run: Tracked) -> Tracker:
    """One more event file; TensorBoard joins those of a folder."""
    return _TensorBoard(SummaryWriter(logdir=str(run.folder / "tensorboard")))


class _TensorBoard:
    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    def log(self, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        step = int(values[STEP])
        for name, value in values.items():
            if name != STEP:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """See `Tracker.close`."""
        self._writer.close()
