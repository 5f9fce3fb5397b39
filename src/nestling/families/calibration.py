"""Which noise gives which score: the arithmetic of setting a base model's difficulty.

The logarithm of a score falls about linearly with the noise knob z, so a straight line fitted near
the target gives the next z to try.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Point", "miss", "next_noise"]

_LOWEST_SCORE = 0.005
_HIGHEST_NOISE = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured model of one family."""

    z: float
    score: float
    n: int


def next_noise(points: Sequence[Point], target: float) -> float:
    """The z (0..10) at which the score is expected to be `target`.

    A line through log(score) over z, weighted by how near a point's score is to the target and by
    its sample size. Falls back to interpolation where the line would not fall.
    """
    goal = math.log(target)
    z = np.array([point.z for point in points])
    height = np.log([max(_LOWEST_SCORE, point.score) for point in points])
    distance = (height - goal) / 0.35
    # variance of log(score) of a binomial share; points at 0 or 1 keep a finite weight
    variance = [
        max(1 - point.score, 1 / point.n) / max(point.score * point.n, 0.5) for point in points
    ]
    weight = np.exp(-0.5 * distance**2) / np.array(variance) + 1e-9
    center_z = float(np.average(z, weights=weight))
    center_height = float(np.average(height, weights=weight))
    spread = float(np.average((z - center_z) ** 2, weights=weight))
    slope = float(np.average((z - center_z) * (height - center_height), weights=weight))
    if spread < 1e-6 or slope / spread > -0.02:
        return _interpolated(points, target)
    found = center_z + (goal - center_height) * spread / slope
    return float(np.clip(found, 0.0, _HIGHEST_NOISE))


def miss(scores: Mapping[str, float], targets: Mapping[str, float]) -> float:
    """The largest distance from target over families, in units that treat low scores as harder."""
    return max(
        abs(scores[name] - target) / math.sqrt(max(0.1, target)) for name, target in targets.items()
    )


def _interpolated(points: Sequence[Point], target: float) -> float:
    ordered = sorted(points, key=lambda point: point.z)
    falling = np.minimum.accumulate([point.score for point in ordered])
    return float(np.interp(-target, -falling, [point.z for point in ordered]))
