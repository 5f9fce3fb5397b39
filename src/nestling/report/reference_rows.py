"""Policies measured on the training families; the reference ones are lines in the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nestling.outer.heldout import UNTRAINED
from nestling.report.estimates import by_group, estimate
from nestling.report.run_data import EpisodeRow, ReferenceRow

__all__ = ["ALL", "is_checkpoint", "line", "reference_rows"]

ALL = "all"
"""Family of the row that pools all training families."""


def reference_rows(
    episodes: Sequence[EpisodeRow], training: Sequence[str]
) -> tuple[ReferenceRow, ...]:
    """Every measured arm, on all training families and on each; checkpoints come last, by step."""
    arms: dict[str, list[EpisodeRow]] = {}
    for one in episodes:
        if one.arm is not None and one.family in training:
            arms.setdefault(one.arm, []).append(one)
    rows = []
    for arm, played in sorted(arms.items(), key=lambda one: (is_checkpoint(one[0]), one[0])):
        rows.append(_row(arm, ALL, played))
        for family in training:
            of_family = [one for one in played if one.family == family]
            if of_family:
                rows.append(_row(arm, family, of_family))
    return tuple(rows)


def is_checkpoint(arm: str) -> bool:
    """Whether an arm is the agent after some training."""
    return arm.startswith("step-")


def line(references: Sequence[ReferenceRow], families: Mapping[str, int]) -> dict[str, float]:
    """Reward of each reference arm, weighted like `families`; arms without one of them are left out.

    The agent, untrained or not, is no reference arm.
    """
    by_arm: dict[str, dict[str, float]] = {}
    for row in references:
        if row.arm != UNTRAINED and not is_checkpoint(row.arm):
            by_arm.setdefault(row.arm, {})[row.family] = row.reward.mean
    total = sum(families.values())
    return {
        arm: sum(count * means[family] for family, count in families.items()) / total
        for arm, means in by_arm.items()
        if total and all(family in means for family in families)
    }


def _row(arm: str, family: str, played: Sequence[EpisodeRow]) -> ReferenceRow:
    groups = by_group(played)
    reward = estimate(groups, lambda one: one.reward, "reference", arm, family)
    assert reward is not None
    valid = [one for one in played if one.is_valid]
    return ReferenceRow(
        arm=arm,
        family=family,
        reward=reward,
        uplift=estimate(groups, lambda one: one.uplift, "reference-uplift", arm, family),
        validity=len(valid) / len(played),
        job_success=sum(one.is_job_done for one in valid) / len(valid) if valid else None,
        worst=min(one.reward for one in played),
    )
