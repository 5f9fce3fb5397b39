"""Intervals and tests for small samples: bootstrap and permutation, seeded, numpy only.

Legend: N values, K clusters, R resamples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from nestling.core.frozen import Frozen

__all__ = [
    "Estimate",
    "Power",
    "cluster_mean",
    "mean",
    "paired_difference",
    "power",
    "sign_flip_p_value",
]

_EXACT_UP_TO = 14
"""Pairs up to which all 2^N sign patterns are tried."""
_CHUNK = 2_000_000
"""Most random numbers held at once."""

_PAIRS_FOR_POWER = 8
_Z_SUM = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)

Array = npt.NDArray[np.float64]


class Estimate(Frozen):
    """A mean with its interval; `lo` and `hi` are None for fewer than two independent values."""

    mean: float
    lo: float | None
    hi: float | None
    n: int
    """Values behind the mean."""
    p_value: float | None = None
    """Two-sided, for a difference against 0."""
    sd: float | None = None
    """Standard deviation of the differences per pair; None for fewer than two pairs."""


def mean(
    values: Sequence[float], *, seed: int, confidence: float = 0.95, resamples: int = 2_000
) -> Estimate | None:
    """Mean of independent values with a percentile bootstrap interval; None for no values."""
    clusters = [[value] for value in values]
    return cluster_mean(clusters, seed=seed, confidence=confidence, resamples=resamples)


def cluster_mean(
    clusters: Sequence[Sequence[float]],
    *,
    seed: int,
    confidence: float = 0.95,
    resamples: int = 2_000,
) -> Estimate | None:
    """Mean over all values when those of one cluster share a task: whole clusters are redrawn.

    Empty clusters are left out; None when nothing is left.
    """
    kept = [np.asarray(cluster, dtype=np.float64) for cluster in clusters if len(cluster)]
    if not kept:
        return None
    sums_K = np.array([cluster.sum() for cluster in kept])
    sizes_K = np.array([float(cluster.size) for cluster in kept])
    n = int(sizes_K.sum())
    centre = float(sums_K.sum() / sizes_K.sum())
    if len(kept) < 2:
        return Estimate(mean=centre, lo=None, hi=None, n=n)
    means_R = _resampled_means(sums_K, sizes_K, np.random.default_rng(seed), resamples)
    tail = (1.0 - confidence) / 2.0
    lo, hi = np.quantile(means_R, [tail, 1.0 - tail])
    return Estimate(mean=centre, lo=float(lo), hi=float(hi), n=n)


def paired_difference(
    first: Sequence[float],
    second: Sequence[float],
    *,
    seed: int,
    confidence: float = 0.95,
    resamples: int = 2_000,
) -> Estimate | None:
    """Mean of `first - second` over pairs, its bootstrap interval and sign-flip p-value.

    Raises `ValueError` when the two are not of the same length.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    estimate = mean(differences, seed=seed, confidence=confidence, resamples=resamples)
    if estimate is None:
        return None
    p_value = sign_flip_p_value(differences, seed=seed, resamples=resamples)
    sd = float(np.std(differences, ddof=1)) if len(differences) > 1 else None
    return estimate.model_copy(update={"p_value": p_value, "sd": sd})


class Power(Frozen):
    """What a paired comparison of this size can show."""

    pairs: int
    sd: float
    """Standard deviation of the differences."""
    detectable: float
    """Smallest true difference that so many pairs find four times out of five."""
    effect: float
    pairs_needed: int
    """Pairs that find a true difference of `effect` four times out of five."""


def power(difference: Estimate, effect: float) -> Power | None:
    """The power statement of a paired difference; None while its spread is not known.

    That takes eight pairs that are not all equal.

    Two-sided at 5 %, normal approximation: n = ((z_0.975 + z_0.8) sd / effect)^2, as for one sample
    in Chow, Shao and Wang, Sample Size Calculations in Clinical Research.
    Raises `ValueError` for an effect that is not above 0.
    """
    if effect <= 0:
        raise ValueError(f"an effect of {effect} cannot be looked for; expected more than 0")
    if not difference.sd or difference.n < _PAIRS_FOR_POWER:
        return None
    reach = _Z_SUM * difference.sd
    return Power(
        pairs=difference.n,
        sd=difference.sd,
        detectable=reach / math.sqrt(difference.n),
        effect=effect,
        pairs_needed=max(2, math.ceil((reach / effect) ** 2)),
    )


def sign_flip_p_value(
    differences: Sequence[float], *, seed: int, resamples: int = 2_000
) -> float | None:
    """Two-sided p-value of "the differences are symmetric about 0"; None for no differences.

    Exact for up to 14 differences, else by random sign patterns with the add-one rule of Phipson
    and Smyth (2010), so never 0.
    """
    values_N = np.asarray(differences, dtype=np.float64)
    if not values_N.size:
        return None
    # Rounding must not turn a tie with the observed sum into a smaller one.
    bar = abs(float(values_N.sum())) - 1e-12 * float(np.abs(values_N).sum())
    if values_N.size <= _EXACT_UP_TO:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=values_N.size)))
        return float(np.mean(np.abs(signs @ values_N) >= bar))
    rng = np.random.default_rng(seed)
    hits, left = 0, resamples
    while left:
        rows = min(left, max(1, _CHUNK // values_N.size))
        signs = rng.integers(0, 2, size=(rows, values_N.size)) * 2.0 - 1.0
        hits += int(np.count_nonzero(np.abs(signs @ values_N) >= bar))
        left -= rows
    return (hits + 1) / (resamples + 1)


def _resampled_means(
    sums_K: Array, sizes_K: Array, rng: np.random.Generator, resamples: int
) -> Array:
    parts: list[Array] = []
    left = resamples
    while left:
        rows = min(left, max(1, _CHUNK // sums_K.size))
        pick = rng.integers(0, sums_K.size, size=(rows, sums_K.size))
        parts.append(sums_K[pick].sum(axis=1) / sizes_K[pick].sum(axis=1))
        left -= rows
    return np.concatenate(parts)
