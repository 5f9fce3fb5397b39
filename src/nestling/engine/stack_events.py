"""What comes of the requests to a stack."""

from __future__ import annotations

from dataclasses import dataclass

from nestling.engine.stack_play import Played, Turns
from nestling.engine.step_stats import LossStats, StepStats

__all__ = ["Event", "Failed", "Finished", "Joined", "Saved", "Trained", "TurnsEnded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The job holds its memory and may play."""

    job: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsEnded:
    """Turns that want an answer."""

    job: int
    turns: Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A play is over."""

    job: int
    played: Played


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A training step is done."""

    job: int
    loss: LossStats
    step: StepStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The trained weights are in a folder."""

    job: int
    base_hash: str
    final_hash: str
    delta_norm: float
    is_finite: bool
    """False: nothing was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The job is gone; the others go on."""

    job: int
    reason: str
    detail: str


Event = Joined | TurnsEnded | Finished | Trained | Saved | Failed
