"""What a mean reward is made of, and which of its parts a change of it came from.

reward = validation + quality + speed, each times its weight, or the fixed price of an episode without
a submission. Quality is 0 without a scored job, so its mean is (share of scored jobs) x (mean quality
of scored jobs); a change of such a product is shared out between its factors by
d(ab) = da (b0 + b1) / 2 + db (a0 + a1) / 2, which leaves no rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from nestling.agent.reward import RewardWeights
from nestling.core.seeds import derive_seed
from nestling.outer.stats import Estimate
from nestling.report.run_data import EpisodeRow, GainAccount, RewardParts

__all__ = ["gain_account", "reward_parts"]

_RESAMPLES = 2_000
_ROOT = 0x50415254

Array = npt.NDArray[np.float64]
"""Legend: K groups, R resamples, S sums of one group (below)."""

_NUM, _VALIDATION, _SCORED, _QUALITY, _SPEED, _REWARD = range(6)


def reward_parts(episodes: Sequence[EpisodeRow], weights: RewardWeights) -> RewardParts | None:
    """Parts of the mean reward; None for no episode."""
    if not episodes:
        return None
    validation = weights.validation * _mean(episodes, lambda one: one.validation)
    quality = weights.quality * _mean(episodes, lambda one: one.quality)
    speed = weights.speed * _mean(episodes, lambda one: one.speed)
    rest = _mean(episodes, lambda one: one.reward) - validation - quality - speed
    return RewardParts(validation=validation, quality=quality, speed=speed, no_submission=rest)


def gain_account(
    before: Sequence[Sequence[EpisodeRow]],
    after: Sequence[Sequence[EpisodeRow]],
    weights: RewardWeights,
    *names: str | int,
) -> GainAccount | None:
    """Where the reward of `after` differs from that of `before`; None when either is empty.

    Both are groups of episodes that share a task. Intervals, 95 %: whole groups are redrawn on each
    side by itself; without two groups on each side there is none. `names` pick the random stream.
    """
    sums = [_sums(groups) for groups in (before, after)]
    if not all(len(one) for one in sums):
        return None
    found = _account([one.sum(axis=0, keepdims=True) for one in sums], weights)
    ends: dict[str, tuple[float | None, float | None]] = dict.fromkeys(found, (None, None))
    if all(len(one) > 1 for one in sums):
        rng = np.random.default_rng(derive_seed(_ROOT, *names))
        redrawn = _account([_redrawn(one, rng) for one in sums], weights)
        for name, values_R in redrawn.items():
            low, high = np.quantile(values_R, [0.025, 0.975])
            ends[name] = (float(low), float(high))
    num = sum(len(group) for group in after)
    estimates = {
        name: Estimate(mean=float(value[0]), lo=ends[name][0], hi=ends[name][1], n=num)
        for name, value in found.items()
    }
    return GainAccount(**estimates)


def _sums(groups: Sequence[Sequence[EpisodeRow]]) -> Array:
    """[K, S]."""
    rows = [
        [
            len(group),
            sum(one.validation for one in group),
            sum(one.is_job_done for one in group),
            sum(one.quality for one in group),
            sum(one.speed for one in group),
            sum(one.reward for one in group),
        ]
        for group in groups
        if group
    ]
    return np.array(rows, dtype=np.float64).reshape(len(rows), 6)


def _redrawn(sums_KS: Array, rng: np.random.Generator) -> Array:
    """[R, S]: sums over as many groups, drawn with replacement."""
    pick = rng.integers(0, len(sums_KS), size=(_RESAMPLES, len(sums_KS)))
    redrawn: Array = sums_KS[pick].sum(axis=1)
    return redrawn


def _account(sides_RS: Sequence[Array], weights: RewardWeights) -> dict[str, Array]:
    """Each part [R] of the difference between the second side and the first."""
    means = [side / side[:, [_NUM]] for side in sides_RS]
    before, after = means
    shares = [one[:, _SCORED] for one in means]
    # Where a side has no scored job, its quality is not known: the other's stands in, so that the
    # whole change counts as success.
    known = [
        np.where(share > 0, one[:, _QUALITY] / np.where(share > 0, share, 1.0), np.nan)
        for one, share in zip(means, shares, strict=True)
    ]
    qualities = [
        np.where(np.isnan(one), np.where(np.isnan(other), 0.0, other), one)
        for one, other in (known, known[::-1])
    ]
    parts = {
        "validation": weights.validation * (after - before)[:, _VALIDATION],
        "success": weights.quality * (shares[1] - shares[0]) * (qualities[0] + qualities[1]) / 2,
        "quality": weights.quality * (qualities[1] - qualities[0]) * (shares[0] + shares[1]) / 2,
        "speed": weights.speed * (after - before)[:, _SPEED],
    }
    total = (after - before)[:, _REWARD]
    parts["no_submission"] = total - np.sum(list(parts.values()), axis=0)
    return {**parts, "total": total}


def _mean(episodes: Sequence[EpisodeRow], value: Callable[[EpisodeRow], float]) -> float:
    return sum(value(one) for one in episodes) / len(episodes)
