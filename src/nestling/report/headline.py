"""The few numbers one looks for first, each with what it is the mean of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nestling.agent.reward import RewardKind, RewardWeights
from nestling.outer.heldout import UNTRAINED
from nestling.outer.stats import Estimate
from nestling.outer.sweep_report import ALL_FAMILIES, Sweep
from nestling.report.decomposition import gain_account
from nestling.report.estimates import by_group, estimate
from nestling.report.paired import by_task, paired_gain
from nestling.report.reference_rows import ALL, is_checkpoint
from nestling.report.run_data import EpisodeRow, Headline, ReferenceRow, StepRow
from nestling.report.step_rows import formula_line

__all__ = ["headline", "held_out_families", "held_out_scope", "last_checkpoint"]


def headline(
    steps: Sequence[StepRow],
    episodes: Sequence[EpisodeRow],
    *,
    training: Sequence[str],
    references: Sequence[ReferenceRow],
    sweeps: Mapping[int, Sweep],
    no_op: tuple[RewardKind, RewardWeights, Mapping[str, float]],
) -> Headline:
    """What the run shows so far."""
    width = _window(steps, training)
    windows = [
        found
        for end in range(width, len(steps) + 1)
        if (found := _reward(steps[end - width : end], episodes)) is not None
    ]
    measured = [row.reward.mean for row in references if (row.arm, row.family) == ("noop", ALL)]
    kind, weights, best_pre = no_op
    formula = formula_line(dict.fromkeys(training, 1), best_pre, kind, weights)
    step, sweep = max(sweeps.items(), default=(None, None))
    arm = last_checkpoint(sweep) if sweep else None
    scope = held_out_scope(sweep, training) if sweep else None
    gain = sweep.comparison(arm, UNTRAINED, scope) if sweep and arm and scope else None
    untrained = [one for one in episodes if one.purpose == "train" and one.version == 0]
    newest = max(
        (
            (one.step or 0, one.arm)
            for one in episodes
            if one.arm is not None and is_checkpoint(one.arm) and one.family in training
        ),
        default=None,
    )
    before = by_task(episodes, UNTRAINED, training)
    after = by_task(episodes, newest[1], training) if newest else {}
    return Headline(
        untrained=estimate(by_group(untrained), lambda one: one.reward, "untrained"),
        final=windows[-1] if windows else None,
        best=max(windows, key=lambda one: one.mean, default=None),
        window_steps=width,
        account=gain_account(
            by_group(untrained), by_group(_played(steps[-width:], episodes)), weights, "account"
        ),
        no_op=measured[0] if measured else formula,
        no_op_source="measured" if measured else "formula" if formula is not None else None,
        measured_untrained=estimate(
            by_group(before.values()), lambda one: one.reward, "measured-untrained"
        ),
        measured=estimate(by_group(after.values()), lambda one: one.reward, "measured"),
        measured_gain=paired_gain(after, before),
        measured_step=newest[0] if newest else None,
        held_out_families=held_out_families(sweep, training) if sweep else (),
        held_out=_arm_reward(sweep, arm, scope),
        held_out_untrained=_arm_reward(sweep, UNTRAINED, scope),
        held_out_gain=gain.difference if gain else None,
        held_out_step=step,
    )


def last_checkpoint(sweep: Sweep) -> str | None:
    """Arm of the trained agent in a sweep; None when only untrained arms were measured."""
    trained = [(one.step, one.arm) for one in sweep.results if one.step > 0]
    return max(trained)[1] if trained else None


def held_out_families(sweep: Sweep, training: Sequence[str]) -> tuple[str, ...]:
    """Families of a sweep that are never trained on."""
    names = dict.fromkeys(one.family for one in sweep.results)
    return tuple(name for name in names if name not in (*training, ALL_FAMILIES))


def held_out_scope(sweep: Sweep, training: Sequence[str]) -> str | None:
    """Which row of a sweep speaks for exactly the held-out families; None when no row does."""
    families = held_out_families(sweep, training)
    if len(families) == 1:
        return families[0]
    measured = {one.family for one in sweep.results}
    return ALL_FAMILIES if families and not measured & set(training) else None


def _window(steps: Sequence[StepRow], training: Sequence[str]) -> int:
    """Last steps it takes to see every training family once; all steps when some is missing."""
    seen: set[str] = set()
    for width, row in enumerate(reversed(steps), start=1):
        seen.update(row.families)
        if seen >= set(training):
            return width
    return max(1, len(steps))


def _reward(steps: Sequence[StepRow], episodes: Sequence[EpisodeRow]) -> Estimate | None:
    played = _played(steps, episodes)
    numbers = sorted(row.step for row in steps)
    return estimate(by_group(played), lambda one: one.reward, "window", *numbers)


def _played(steps: Sequence[StepRow], episodes: Sequence[EpisodeRow]) -> list[EpisodeRow]:
    """Training episodes that these steps used."""
    numbers = {row.step for row in steps}
    return [one for one in episodes if one.purpose == "train" and one.step in numbers]


def _arm_reward(sweep: Sweep | None, arm: str | None, scope: str | None) -> Estimate | None:
    if sweep is None or arm is None or scope is None:
        return None
    try:
        summary = sweep.result(arm, scope).summary
    except KeyError:
        return None
    return summary.reward if summary else None
