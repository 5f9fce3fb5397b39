"""Means with confidence intervals: of one list of numbers, and of a paired difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Interval", "mean_interval", "paired_difference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean of `n` numbers with its two-sided confidence interval."""

    mean: float
    lo: float
    hi: float
    n: int


def mean_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Mean and Student-t interval; numbers that are all equal give an interval of width zero.

    A single number says nothing about spread: its interval is the number itself.

    Raises:
        ValueError: when there are no numbers.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        raise ValueError("a mean needs at least one number")
    if (data == data[0]).all():
        # Exact on purpose: the sum of equal floats divided by n need not give the float back.
        value = float(data[0])
        return Interval(mean=value, lo=value, hi=value, n=data.size)
    mean = float(data.mean())
    standard_error = float(data.std(ddof=1)) / float(np.sqrt(data.size))
    half_width = _t_quantile(data.size - 1, 0.5 + confidence / 2) * standard_error
    return Interval(mean=mean, lo=mean - half_width, hi=mean + half_width, n=data.size)


def paired_difference(after: Sequence[float], before: Sequence[float]) -> Interval:
    """95 % interval of mean(after_i - before_i); both lists hold the same items in the same order.

    Items are independent draws from one family, so the t interval of the differences applies.
    It is clipped to [-1, 1], the range of a difference of two scores.

    Raises:
        ValueError: when the lists differ in length.
    """
    if len(after) != len(before):
        raise ValueError(f"paired scores need equal lengths, got {len(after)} and {len(before)}")
    differences = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    interval = mean_interval(differences.tolist())
    return Interval(
        mean=interval.mean, lo=max(interval.lo, -1.0), hi=min(interval.hi, 1.0), n=interval.n
    )


def _t_quantile(degrees_of_freedom: int, probability: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, probability))
