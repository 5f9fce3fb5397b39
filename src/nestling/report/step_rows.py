"""One row per committed outer step, from its record and from the episodes it used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from nestling.agent.reward import RewardKind, RewardWeights, no_op_reward
from nestling.outer.step_report import StepReport
from nestling.report.estimates import by_group, estimate
from nestling.report.reference_rows import line
from nestling.report.run_data import EpisodeRow, ReferenceRow, StepRow

__all__ = ["formula_line", "step_rows"]


def step_rows(
    reports: Sequence[StepReport],
    episodes: Sequence[EpisodeRow],
    *,
    references: Sequence[ReferenceRow],
    better_base: Mapping[str, str],
    best_pre: Mapping[str, float],
    no_op: tuple[RewardKind, RewardWeights],
) -> tuple[StepRow, ...]:
    """Rows in step order."""
    of_step: dict[int, list[EpisodeRow]] = {}
    for one in episodes:
        if one.purpose == "train" and one.step is not None:
            of_step.setdefault(one.step, []).append(one)
    rows = []
    for report in reports:
        played = of_step.get(report.step, [])
        families = dict(sorted(Counter(one.family for one in played).items()))
        rows.append(
            _row(
                report,
                played,
                families=families,
                better_base=better_base,
                no_op_formula=formula_line(families, best_pre, *no_op),
                references=line(references, families),
            )
        )
    return tuple(rows)


def formula_line(
    families: Mapping[str, int],
    best_pre: Mapping[str, float],
    kind: RewardKind,
    weights: RewardWeights,
) -> float | None:
    """No-op reward by formula, weighted like `families`; None when a best_pre is not known."""
    total = sum(families.values())
    if not total or any(family not in best_pre for family in families):
        return None
    rewards = [
        count * no_op_reward(best_pre[family], kind=kind, weights=weights)
        for family, count in families.items()
    ]
    return sum(rewards) / total


def _row(
    report: StepReport,
    played: Sequence[EpisodeRow],
    *,
    families: Mapping[str, int],
    better_base: Mapping[str, str],
    no_op_formula: float | None,
    references: Mapping[str, float],
) -> StepRow:
    groups = by_group(played)
    valid = [one for one in played if one.is_valid]
    step = report.step

    def is_better(one: EpisodeRow) -> float | None:
        if one.base_model is None or one.family not in better_base:
            return None
        return float(one.base_model == better_base[one.family])

    return StepRow(
        step=step,
        report=report,
        num_groups=len(groups),
        families=families,
        validation=estimate(groups, lambda one: one.validation, "validation", step),
        quality=estimate(groups, lambda one: one.quality, "quality", step),
        speed=estimate(groups, lambda one: one.speed, "speed", step),
        validity=estimate(groups, lambda one: float(one.is_valid), "validity", step),
        first_try=estimate(groups, lambda one: float(one.valid_attempt == 1), "first", step),
        job_success=estimate(
            groups, lambda one: float(one.is_job_done) if one.is_valid else None, "jobs", step
        ),
        post=estimate(groups, lambda one: one.post, "post", step),
        best_pre=estimate(
            groups, lambda one: one.best_pre if one.is_job_done else None, "best-pre", step
        ),
        better_base=estimate(groups, is_better, "better-base", step),
        attempts=_mean([one.num_attempts for one in played]),
        episode_s=_mean([one.seconds for one in played]),
        best_of_group=_mean([max(one.reward for one in group) for group in groups]),
        group_size=_mean([len(group) for group in groups]),
        distinct_share=len({one.settings for one in valid}) / len(valid) if valid else None,
        num_valid=len(valid),
        no_op_formula=no_op_formula,
        references=references,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
