"""What one outer step did, as one record: for the terminal, the store and the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from nestling.core.frozen import Frozen
from nestling.core.seeds import derive_seed
from nestling.outer.batch import Batch, FinishedGroup, PlayedEpisode
from nestling.outer.config import OuterConfig
from nestling.outer.episode_facts import Summary, facts_of, summarise
from nestling.outer.learner import LossStats, StepStats

__all__ = ["GroupCounts", "GroupFate", "StepReport", "UpdateStats", "step_report"]


class UpdateStats(Frozen):
    """What the learner reported of a step's last update; None where it cannot tell."""

    loss: float
    num_tokens: int
    learning_rate: float
    grad_norm: float | None
    kl_sampler: float | None
    kl_initial: float | None
    nll: float | None
    clipped_share: float | None
    max_logprob_gap: float | None

    @classmethod
    def of(cls, loss: LossStats, step: StepStats) -> UpdateStats:
        """Join the two halves of an update."""
        return cls(
            loss=loss.loss,
            num_tokens=loss.num_tokens,
            learning_rate=step.learning_rate,
            grad_norm=step.grad_norm,
            kl_sampler=loss.kl_sampler,
            kl_initial=loss.kl_initial,
            nll=loss.nll,
            clipped_share=loss.clipped_share,
            max_logprob_gap=loss.max_logprob_gap,
        )


GroupFate = Literal["used", "constant", "short", "dropped"]


class GroupCounts(Frozen):
    """What became of the step's groups; the first four add up to all of them."""

    used: int
    constant: int
    """Left out: every reward equal."""
    short: int
    """Left out: fewer than two finished episodes, or no tokens to train on."""
    dropped: int
    """Left out: too stale."""
    over_stale: int
    """Used although staler than the bound."""


class StepReport(Frozen):
    """One committed outer step."""

    step: int
    """From 1."""
    version: int
    """Updates made so far."""
    skipped: bool
    """No group had anything to teach: no update was made."""
    groups: GroupCounts
    group_fates: dict[str, GroupFate]
    """What became of each group, by its id."""
    episodes: int
    """Finished, whether trained on or not."""
    dead_episodes: int
    summary: Summary | None
    """Over the finished episodes; None when there is none."""
    reward_by_family: dict[str, float]
    update: UpdateStats | None
    """None when skipped."""
    staleness_mean: float
    """Training steps between sampling and training, mean over the finished episodes."""
    staleness_max: int
    agent_tokens: int
    """Tokens the policy sampled."""
    step_s: float
    """Wall-clock seconds since the step before, waiting for episodes included."""
    train_s: float
    """Part of it spent on the update and on saving."""
    eta_s: float
    """Seconds left at the pace of this process so far."""


def step_report(
    config: OuterConfig,
    *,
    step: int,
    groups: Sequence[FinishedGroup],
    batch: Batch,
    update: UpdateStats | None,
    version: int,
    seconds: tuple[float, float],
    eta_s: float,
) -> StepReport:
    """The record of a step; `seconds` are those of the whole step and of its update."""
    episodes = [episode for group in groups for episode in group.episodes]
    trained_version = version - (config.epochs if update else 0)
    staleness = [(trained_version - episode.version) // config.epochs for episode in episodes]
    return StepReport(
        step=step,
        version=version,
        skipped=update is None,
        groups=GroupCounts(
            used=len(batch.used),
            constant=len(batch.constant),
            short=len(batch.short),
            dropped=len(batch.dropped),
            over_stale=len(batch.over_stale),
        ),
        group_fates=_fates(groups, batch),
        episodes=len(episodes),
        dead_episodes=sum(len(group.dead) for group in groups),
        summary=summarise(
            [[facts_of(one.result) for one in group.episodes] for group in groups],
            seed=derive_seed(config.seed, "step-interval", step),
            confidence=config.held_out.confidence,
            resamples=config.held_out.resamples,
        ),
        reward_by_family=_by_family(episodes),
        update=update,
        staleness_mean=sum(staleness) / len(staleness) if staleness else 0.0,
        staleness_max=max(staleness, default=0),
        agent_tokens=sum(one.result.sampled_tokens for one in episodes),
        step_s=seconds[0],
        train_s=seconds[1],
        eta_s=eta_s,
    )


def _fates(groups: Sequence[FinishedGroup], batch: Batch) -> dict[str, GroupFate]:
    ids = {group.plan.index: group.plan.group_id for group in groups}
    fates: dict[str, GroupFate] = {}
    for index in batch.used:
        fates[ids[index]] = "used"
    for index in batch.constant:
        fates[ids[index]] = "constant"
    for index in batch.short:
        fates[ids[index]] = "short"
    for index in batch.dropped:
        fates[ids[index]] = "dropped"
    return fates


def _by_family(episodes: Sequence[PlayedEpisode]) -> dict[str, float]:
    rewards: dict[str, list[float]] = {}
    for episode in episodes:
        rewards.setdefault(episode.plan.family, []).append(episode.result.reward)
    return {name: sum(found) / len(found) for name, found in sorted(rewards.items())}
