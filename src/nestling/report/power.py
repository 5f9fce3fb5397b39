"""How many episodes and hidden items it takes to see a difference, from the noise a sweep measured.

A pair is one task played by two arms with the same seeds. The variance of its difference in reward
has four sources:

- families: mean differences that are not the same on every family. They are what is measured, not
  noise, as long as the claim is about these families; so they are taken out and only shown.
- tasks: what both arms of a pair share (their covariance within families). Pairing has removed it.
- episodes: the rest within a family, from the agents' sampling and their jobs' training.
- items: a job's uplift is a mean over N items; its 95 % interval, paired by item, is in its outcome,
  and the reward's slope turns it into reward (the share paid for the score itself adds its binomial
  error). All jobs of a family are scored on the same N items, so more episodes do not shrink this
  part, and it limits what can be said about items like these. It is a bound: it takes both arms'
  parts as independent, and on the same items they partly cancel.

Two-sided at 5 %, found four times out of five: pairs = (z sd / effect)^2 with z = z_0.975 + z_0.8
(one sample; Chow, Shao and Wang, Sample Size Calculations in Clinical Research). With the items'
part v per family and F families, effect^2 - z^2 v / F stands in place of effect^2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np

from nestling.core.seeds import derive_seed
from nestling.outer import stats
from nestling.outer.heldout import UNTRAINED
from nestling.outer.stats import Estimate
from nestling.report.paired import Task, by_task
from nestling.report.reference_rows import is_checkpoint
from nestling.report.run_data import EpisodeRow, RunData

__all__ = ["EFFECT", "ItemsNeed", "PowerRow", "power_rows"]

EFFECT: Final = 0.05
"""Difference in mean reward that is worth finding."""
_NOOP: Final = "noop"
_ITEMS: Final = (100, 200, 400, 800, 1_600)
_LEAST_PER_FAMILY: Final = 4
"""Pairs of a family from which its spread may be estimated."""
_Z95: Final = NormalDist().inv_cdf(0.975)
_Z: Final = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsNeed:
    """What it takes with so many hidden items, to speak of items like these."""

    items: int
    floor: float
    """Smallest difference that any number of episodes could find."""
    pairs: int | None
    """In all; None when the effect is below the floor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerRow:
    """One paired comparison: its sources of variance, and the size that would find an effect."""

    arm: str
    against: str
    families: tuple[str, ...]
    difference: Estimate
    family_sd: float
    """Between the families' mean differences, their sampling error taken out; 0 with one family."""
    task_sd: float
    """Shared by both arms of a pair; 0 where they do not vary together."""
    episode_sd: float
    """Of a pair's difference within its family."""
    item_sd: float
    """Bound on the part of a family's mean difference that its `items` hidden items bring."""
    items: int
    """Hidden items per job; 0 when no job was scored."""
    effect: float
    detectable: float
    """Smallest difference that these pairs find on these items."""
    pairs: int
    """In all, that find the effect on these items."""
    by_items: tuple[ItemsNeed, ...]


def power_rows(data: RunData, effect: float = EFFECT) -> list[PowerRow]:
    """Every reference arm and the newest checkpoint, against the untrained agent (else the no-op).

    Training and other families apart. Comparisons with a family of fewer than four pairs are left
    out, and those whose pairs do not vary. Raises `ValueError` for an effect that is not above 0.
    """
    if effect <= 0:
        raise ValueError(f"an effect of {effect} cannot be looked for; expected more than 0")
    families = {one.family for one in data.episodes}
    names = {one.arm for one in data.episodes if one.arm is not None}
    arms = {arm: by_task(data.episodes, arm, families) for arm in names}
    against = UNTRAINED if UNTRAINED in arms else _NOOP
    if against not in arms:
        return []
    newest = max((arm for arm in arms if is_checkpoint(arm)), default=None)
    others = [arm for arm in sorted(arms) if arm != against and not is_checkpoint(arm)]
    rows = []
    for arm in [*([newest] if newest else []), *others]:
        for training in (True, False):
            pairs = _pairs_by_family(data, arms[arm], arms[against], training=training)
            row = _row(data, pairs, effect=effect)
            if row is not None:
                rows.append(row)
    return rows


_Played = Mapping[Task, EpisodeRow]
_Pairs = Sequence[tuple[EpisodeRow, EpisodeRow]]


def _pairs_by_family(
    data: RunData, first: _Played, second: _Played, *, training: bool
) -> dict[str, _Pairs]:
    """Pairs by family."""
    found: dict[str, list[tuple[EpisodeRow, EpisodeRow]]] = {}
    for place in sorted(first.keys() & second.keys()):
        if (place[0] in data.training_families) == training:
            found.setdefault(place[0], []).append((first[place], second[place]))
    return dict(found)


def _row(data: RunData, families: dict[str, _Pairs], *, effect: float) -> PowerRow | None:
    if not families or any(len(pairs) < _LEAST_PER_FAMILY for pairs in families.values()):
        return None
    differences = [np.array([a.reward - b.reward for a, b in pairs]) for pairs in families.values()]
    num_pairs, num_families = sum(len(one) for one in differences), len(families)
    within = sum(float(((one - one.mean()) ** 2).sum()) for one in differences)
    within /= num_pairs - num_families
    if within <= 0:
        return None
    pairs = [pair for found in families.values() for pair in found]
    difference = stats.paired_difference(
        [a.reward for a, _ in pairs], [b.reward for _, b in pairs], seed=derive_seed(0, "power")
    )
    assert difference is not None
    covariance = sum(
        (len(found) - 1)
        * float(np.cov([a.reward for a, _ in found], [b.reward for _, b in found])[0, 1])
        for found in families.values()
    ) / (num_pairs - num_families)
    items = round(_mean([one.num_items for pair in pairs for one in pair if one.num_items]))
    one_item = _mean(
        [
            _mean([_item_variance(data, a) + _item_variance(data, b) for a, b in found])
            for found in families.values()
        ]
    )
    first_row, second_row = pairs[0]
    return PowerRow(
        arm=first_row.arm or "",
        against=second_row.arm or "",
        families=tuple(families),
        difference=difference,
        family_sd=_family_sd(differences, within),
        task_sd=math.sqrt(max(0.0, covariance)),
        episode_sd=math.sqrt(within),
        item_sd=math.sqrt(one_item / items) if items else 0.0,
        items=items,
        effect=effect,
        detectable=_Z * math.sqrt(within / num_pairs),
        pairs=_pairs(within, effect**2),
        by_items=tuple(
            _need(count, within, one_item / count / num_families, effect)
            for count in sorted({*_ITEMS, items} - {0})
        )
        if items
        else (),
    )


def _need(items: int, within: float, variance: float, effect: float) -> ItemsNeed:
    floor = _Z * math.sqrt(variance)
    left = effect**2 - floor**2
    return ItemsNeed(items=items, floor=floor, pairs=_pairs(within, left) if left > 0 else None)


def _pairs(variance: float, squared_effect: float) -> int:
    return max(2, math.ceil(_Z**2 * variance / squared_effect))


def _family_sd(differences: Sequence[np.ndarray], within: float) -> float:
    if len(differences) < 2:
        return 0.0
    means = [float(one.mean()) for one in differences]
    sampling = _mean([within / one.size for one in differences])
    return math.sqrt(max(0.0, float(np.var(means, ddof=1)) - sampling))


def _item_variance(data: RunData, one: EpisodeRow) -> float:
    """Variance of the reward that a single hidden item brings; divided by N for N items."""
    if one.post is None or one.best_pre is None or one.uplift_ci is None:
        return 0.0
    weights = data.weights
    low, high = one.uplift_ci
    uplift_sd = (high - low) / (2 * _Z95)
    room = 1 - one.best_pre if one.post > one.best_pre else one.best_pre
    slope = 1 / room if room > 0 else 0.0
    if one.reward_kind == "seed":
        post_sd = math.sqrt(one.post * (1 - one.post) / one.num_items)
        sd = weights.post_share * post_sd + (1 - weights.post_share) * slope * uplift_sd
    else:
        sd = slope * uplift_sd if one.quality else 0.0
    return (weights.quality * sd) ** 2 * one.num_items


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
