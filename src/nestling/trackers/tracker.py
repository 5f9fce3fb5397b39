"""What a tracker is, and how one is opened by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol, cast

from nestling.core.errors import ConfigError

__all__ = ["KINDS", "Tracked", "Tracker", "TrackerKind", "open_tracker"]

TrackerKind = Literal["wandb", "trackio", "tensorboard"]
KINDS: Final[tuple[TrackerKind, ...]] = ("wandb", "trackio", "tensorboard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """The run as a tracker is told of it."""

    project: str
    name: str
    run_id: str
    """The same for every part of a run that was interrupted; letters, digits and hyphens."""
    config: Mapping[str, Any]
    folder: Path
    """Where a tracker may keep files of its own."""


class Tracker(Protocol):
    """Takes metrics; blocks little, and may drop what it cannot send."""

    def log(self, values: Mapping[str, float]) -> None:
        """Metrics of one step, which is among them as `outer/step`; steps may come out of order."""
        ...

    def close(self) -> None:
        """Write out what is waiting; once."""
        ...


def open_tracker(kind: TrackerKind, run: Tracked) -> Tracker:
    """A tracker of this kind, started.

    Raises `ConfigError` when its package is not installed.
    """
    try:
        module = importlib.import_module(f"nestling.trackers.{kind}_tracker")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tracker {kind!r} needs the package {error.name}; expected it to be installed; "
            f"install it with: pip install 'nestling[{kind}]'"
        ) from error
    return cast("Tracker", module.start(run))
