"""How long a job will keep its worker: from its settings, corrected by what such jobs really took.

Before a job has a past, the probe's figure stands, which follows from the job's bounds: steps,
rollouts, turns, tokens and the size of the base. Every finished job then says what the computed
seconds were worth: of the same family, base and machine type, else of base and machine type, else
of the machine type. Three of them give a ratio (the median of measured over computed), five of
different sizes a line (Theil 1950, Sen 1968: the median of all slopes between two), as starting up
takes the same time for small and large jobs. Medians, because a job that ran beside a busy
neighbour must not count for more than one.

A prediction orders the queue and is shown. What is reserved is the deadline, so that a wrong
prediction never passes a cap.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Literal

from nestling.core.errors import StoreError
from nestling.fleet.plan import Expected
from nestling.store.history import History, PastJob

__all__ = ["JobShape", "Prediction", "Predictor", "corrected_s", "expected_job"]

_FEWEST = 3
"""Past jobs before their median counts: the middle of three survives one stray value."""
_FEWEST_OF_A_LINE = 5
"""Theil's line survives 29 % stray values: one of five."""
_LEAST_SPREAD = 1.5
"""Largest over smallest computed seconds, or the slope says little."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """What is known of a job before it runs."""

    family: str
    base: str
    turns: float
    """steps x rollouts a step x turns a rollout; at most, as the job's bounds say."""
    bound_s: float | None
    """Seconds computed from its settings; None when it was not probed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Expected seconds and what they rest on."""

    seconds: float
    source: Literal["nothing", "bounds", "history"]
    num_jobs: int = 0
    """Past jobs behind it."""


class Predictor:
    """Predictions for one machine type over the account's history."""

    def __init__(self, history: History, machine: str) -> None:
        self._history = history
        self._machine = machine

    def predict(self, shape: JobShape) -> Prediction:
        """Expected seconds; 0 from `nothing` when neither bounds nor a past are known."""
        past = self._past(shape)
        if shape.bound_s is not None and shape.bound_s > 0:
            if not past:
                return Prediction(seconds=shape.bound_s, source="bounds")
            return Prediction(
                seconds=corrected_s(shape.bound_s, past), source="history", num_jobs=len(past)
            )
        worked = [one for one in past if one.turns > 0]
        if not worked or shape.turns <= 0:
            return Prediction(seconds=0.0, source="nothing")
        per_turn_s = median(one.seconds / one.turns for one in worked)
        return Prediction(seconds=shape.turns * per_turn_s, source="history", num_jobs=len(worked))

    def remember(self, run: str, job: str, shape: JobShape, seconds: float) -> None:
        """Add a finished job; one without a bound or a positive time teaches nothing."""
        if shape.bound_s is None or shape.bound_s <= 0 or seconds <= 0:
            return
        past = PastJob(
            family=shape.family,
            base=shape.base,
            machine=self._machine,
            turns=shape.turns,
            bound_s=shape.bound_s,
            seconds=seconds,
        )
        try:
            self._history.add(run, job, past)
        except StoreError as error:  # predictions stay as they are; the run loses nothing
            _log.warning("the time of %s is not remembered: %s", job, error)

    def _past(self, shape: JobShape) -> Sequence[PastJob]:
        """The nearest kin that there are enough of."""
        kin = ((shape.base, shape.family), (shape.base, None), (None, None))
        for base, family in kin:
            past = self._history.newest(machine=self._machine, base=base, family=family)
            if len(past) >= _FEWEST:
                return past
        return []


def corrected_s(bound_s: float, past: Sequence[PastJob]) -> float:
    """Expected seconds of a job with these computed ones; `past` holds at least one job."""
    ratio_s = bound_s * median(one.seconds / one.bound_s for one in past)
    bounds = [one.bound_s for one in past]
    if len(past) < _FEWEST_OF_A_LINE or max(bounds) < _LEAST_SPREAD * min(bounds):
        return ratio_s
    slope = median(
        (one.seconds - other.seconds) / (one.bound_s - other.bound_s)
        for one, other in combinations(past, 2)
        if one.bound_s != other.bound_s
    )
    line_s = slope * bound_s + median(one.seconds - slope * one.bound_s for one in past)
    return line_s if slope > 0 and line_s > 0 else ratio_s


def expected_job(history: History, machine: str, families: Sequence[str]) -> Expected | None:
    """One job of these families on a machine type; None without a past there."""
    past = {family: history.newest(machine=machine, family=family) for family in families}
    medians = [median(one.seconds for one in jobs) for jobs in past.values() if jobs]
    if not medians:
        return None
    return Expected(seconds=fmean(medians), num_jobs=sum(len(jobs) for jobs in past.values()))
