"""One row per committed outer step, from its record and from the episodes it used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from nestling.agent.reward import RewardKind, RewardWeights, no_op_reward
from nestling.outer.stats import Estimate
from nestling.outer.step_report import StepReport
from nestling.report.decomposition import reward_parts
from nestling.report.diversity import distinct_share, job_difference
from nestling.report.estimates import by_group, estimate, stratified
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
                weights=no_op[1],
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
    weights: RewardWeights,
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
        parts=reward_parts(played, weights),
        scored_quality=estimate(
            groups, lambda one: one.quality if one.is_job_done else None, "scored-quality", step
        ),
        best_of_group=_over_groups(
            [max(one.reward for one in group) for group in groups], "best", step
        ),
        group_size=_mean([len(group) for group in groups]),
        distinct_share=len({one.settings for one in valid}) / len(valid) if valid else None,
        distinct_in_group=_over_groups(
            [
                distinct_share([one.job_hash or "" for one in group if one.is_valid])
                for group in groups
            ],
            "distinct",
            step,
        ),
        job_difference=_over_groups(
            [job_difference([one.settings for one in group if one.settings]) for group in groups],
            "difference",
            step,
        ),
        base_share_by_family=_base_shares(valid),
        num_valid=len(valid),
        no_op_formula=no_op_formula,
        references=references,
    )


def _over_groups(values: Sequence[float | None], *names: str | int) -> Estimate | None:
    """Mean over the groups that have a value, each group one independent value."""
    return stratified([(1.0, [value for value in values if value is not None])], *names)


def _base_shares(valid: Sequence[EpisodeRow]) -> dict[str, dict[str, float]]:
    found: dict[str, Counter[str]] = {}
    for one in valid:
        if one.base_model is not None:
            found.setdefault(one.family, Counter())[one.base_model] += 1
    return {
        family: {base: count / bases.total() for base, count in sorted(bases.items())}
        for family, bases in sorted(found.items())
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
