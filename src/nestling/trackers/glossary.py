"""Every metric of a run: its name, its unit, what it means, and where it comes from.

`docs/metrics.md` holds the same table; a test compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nestling.outer.episode_facts import Summary
from nestling.outer.heldout import UNTRAINED
from nestling.outer.stats import Estimate
from nestling.outer.step_report import StepReport, UpdateStats
from nestling.outer.sweep_report import Sweep

__all__ = [
    "FAMILY_METRICS",
    "STEP",
    "STEP_METRICS",
    "Metric",
    "step_metrics",
    "sweep_metrics",
]

STEP = "outer/step"
"""The x axis of all others."""

_AGENT = "agent"
"""What a checkpoint's arm is called, so that its values make one line."""
_CHECKPOINT = "step-"

_Get = Callable[[StepReport], float | None]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of an outer step."""

    name: str
    meaning: str
    get: _Get
    """None: this step does not have it."""


def _summary(get: Callable[[Summary], float | None]) -> _Get:
    return lambda report: None if report.summary is None else get(report.summary)


def _update(get: Callable[[UpdateStats], float | None]) -> _Get:
    return lambda report: None if report.update is None else get(report.update)


def _of(
    get: Callable[[Summary], Estimate | None], part: Callable[[Estimate], float | None]
) -> _Get:
    def value(report: StepReport) -> float | None:
        estimate = None if report.summary is None else get(report.summary)
        return None if estimate is None else part(estimate)

    return value


STEP_METRICS: tuple[Metric, ...] = (
    Metric(STEP, "outer step, from 1", lambda one: one.step),
    Metric("outer/version", "updates of the agent so far", lambda one: one.version),
    Metric("outer/skipped", "1: no group had anything to teach", lambda one: float(one.skipped)),
    Metric("outer/episodes", "finished episodes of the step", lambda one: one.episodes),
    Metric(
        "outer/dead_episodes", "episodes that the machinery broke", lambda one: one.dead_episodes
    ),
    Metric("outer/staleness_mean", "training steps between playing and learning, mean",
           lambda one: one.staleness_mean),
    Metric("outer/staleness_max", "the most of them", lambda one: one.staleness_max),
    Metric("outer/agent_tokens", "tokens that the agent sampled", lambda one: one.agent_tokens),
    Metric("outer/step_s", "seconds since the step before", lambda one: one.step_s),
    Metric("outer/train_s", "part of it for the update and saving", lambda one: one.train_s),
    Metric("outer/eta_s", "seconds left at the pace so far", lambda one: one.eta_s),
    Metric("groups/used", "groups learned from", lambda one: one.groups.used),
    Metric("groups/constant", "left out: all rewards equal", lambda one: one.groups.constant),
    Metric("groups/short", "left out: nothing to compare", lambda one: one.groups.short),
    Metric("groups/dropped", "left out: too stale", lambda one: one.groups.dropped),
    Metric("groups/over_stale", "used although too stale", lambda one: one.groups.over_stale),
    Metric("reward/mean", "reward, mean over episodes",
           _of(lambda one: one.reward, lambda one: one.mean)),
    Metric("reward/lo", "lower end of its 95 % interval, over groups",
           _of(lambda one: one.reward, lambda one: one.lo)),
    Metric("reward/hi", "upper end", _of(lambda one: one.reward, lambda one: one.hi)),
    Metric("reward/worst", "lowest reward", _summary(lambda one: one.reward_worst)),
    Metric("reward/best", "highest reward", _summary(lambda one: one.reward_best)),
    Metric("reward/validation", "validation term before its weight, mean",
           _summary(lambda one: one.validation)),
    Metric("reward/quality", "quality term, mean", _summary(lambda one: one.quality)),
    Metric("reward/speed", "speed term, mean", _summary(lambda one: one.speed)),
    Metric("jobs/valid_share", "episodes with an accepted submission",
           _summary(lambda one: one.validity)),
    Metric("jobs/first_try_share", "episodes whose first submission was accepted",
           _summary(lambda one: one.first_try_validity)),
    Metric("jobs/success_share", "accepted jobs that trained and were scored",
           _summary(lambda one: one.job_success)),
    Metric("jobs/uplift", "trained minus best untrained score, mean over scored jobs",
           _of(lambda one: one.uplift, lambda one: one.mean)),
    Metric("jobs/uplift_lo", "lower end of its 95 % interval",
           _of(lambda one: one.uplift, lambda one: one.lo)),
    Metric("jobs/uplift_hi", "upper end", _of(lambda one: one.uplift, lambda one: one.hi)),
    Metric("jobs/post", "hidden score of trained models, mean",
           _of(lambda one: one.post, lambda one: one.mean)),
    Metric("choices/config_share", "accepted jobs that set a `[prime_rl]` key",
           _summary(lambda one: one.config_use)),
    Metric("choices/config_keys", "`[prime_rl]` keys set per accepted job",
           _summary(lambda one: one.config_keys_mean)),
    Metric("update/loss", "loss of the agent's update", _update(lambda one: one.loss)),
    Metric("update/tokens", "tokens learned from", _update(lambda one: one.num_tokens)),
    Metric("update/learning_rate", "its learning rate", _update(lambda one: one.learning_rate)),
    Metric("update/grad_norm", "gradient norm before clipping",
           _update(lambda one: one.grad_norm)),
    Metric("update/kl_sampler", "KL between sampler and learner, per token",
           _update(lambda one: one.kl_sampler)),
    Metric("update/kl_initial", "KL to the untrained agent, per token",
           _update(lambda one: one.kl_initial)),
    Metric("update/nll", "negative log-likelihood of what was sampled, per token",
           _update(lambda one: one.nll)),
    Metric("update/clipped_share", "tokens whose ratio was clipped",
           _update(lambda one: one.clipped_share)),
    Metric("update/logprob_gap_max", "largest gap between the two log-probabilities of a token",
           _update(lambda one: one.max_logprob_gap)),
)  # fmt: skip
"""One value a step, under a fixed name."""

FAMILY_METRICS: Mapping[str, str] = {
    "family/FAMILY/reward": "reward on one family, mean over the step's episodes",
    "choices/base/MODEL_share": "accepted jobs on this base model",
    "measured/FAMILY/POLICY_reward": "reward in a sweep; the trained agent is `agent`, families "
    "pooled are `all`",
    "measured/FAMILY/POLICY_gain": "paired difference to the untrained agent",
    "measured/FAMILY/POLICY_gain_lo": "lower end of its 95 % interval",
    "measured/FAMILY/POLICY_gain_hi": "upper end",
}
"""Names with a part that depends on the run."""


def step_metrics(report: StepReport) -> dict[str, float]:
    """Every metric that a step has; finite values only."""
    found = {one.name: one.get(report) for one in STEP_METRICS}
    for family, reward in report.reward_by_family.items():
        found[f"family/{family}/reward"] = reward
    shares = report.summary.base_model_share if report.summary else {}
    for base, share in shares.items():
        found[f"choices/base/{base}_share"] = share
    return _finite(found)


def sweep_metrics(step: int, sweep: Sweep) -> dict[str, float]:
    """Every metric of a sweep, with the step it followed."""
    found: dict[str, float | None] = {STEP: step}
    for row in sweep.results:
        if row.summary is not None:
            name = f"measured/{row.family}/{_policy(row.arm)}_reward"
            found[name] = row.summary.reward.mean
    for one in sweep.comparisons:
        if one.against == UNTRAINED:
            name = f"measured/{one.family}/{_policy(one.arm)}_gain"
            found[name] = one.difference.mean
            found[f"{name}_lo"] = one.difference.lo
            found[f"{name}_hi"] = one.difference.hi
    return _finite(found)


def _policy(arm: str) -> str:
    return _AGENT if arm.startswith(_CHECKPOINT) else arm


def _finite(found: Mapping[str, float | None]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in found.items()
        if value is not None and math.isfinite(value)
    }
