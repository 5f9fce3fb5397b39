"""What an episode earns. Pure: attempts and an outcome in, terms out.

Two rules. `seed` is the published one: 0.35 validation + 0.60 quality + 0.05 speed, where a valid job
that trains nothing still earns its validation, a quarter of its untrained score and the speed term.
`paired` pays validation and only what training is shown to have added over the best untrained base.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from pydantic import Field, model_validator

from nestling.core.frozen import Frozen
from nestling.jobs.outcome import Outcome

__all__ = [
    "REWARD_KINDS",
    "RewardKind",
    "RewardWeights",
    "Terms",
    "compute_terms",
    "no_op_reward",
    "paired_reward",
    "seed_reward",
    "shown_gain",
    "uplift_term",
]

RewardKind = Literal["seed", "paired"]
REWARD_KINDS: tuple[RewardKind, ...] = ("seed", "paired")


class RewardWeights(Frozen):
    """The numbers that are enforced, and from which the agent's instructions are rendered."""

    validation: float = Field(0.35, ge=0, le=1)
    """Weight of the term for a submission that passes the probe."""
    quality: float = Field(0.60, ge=0, le=1)
    """Weight of the term for the trained model."""
    speed: float = Field(0.05, ge=0, le=1)
    """Weight of the term for a job below its budget."""
    by_attempt: tuple[float, ...] = (1.0, 0.8, 0.6)
    """Validation term when attempt 1, 2, ... is the valid one; its length is the cap on attempts."""
    no_submission: float = Field(-0.1, ge=-1, le=0)
    """Whole reward of an episode without one readable submission."""
    post_share: float = Field(0.25, ge=0, le=1)
    """Part of the `seed` quality that pays the trained score as such; the rest pays uplift."""
    agent_fault_reasons: tuple[str, ...] = ("env.",)
    """Prefixes of outcome reasons that mean death in the agent's code; `paired` then pays nothing."""
    machine_fault_reasons: tuple[str, ...] = ("env.jail.",)
    """Exceptions to them: the jail itself could not start."""

    @model_validator(mode="after")
    def _check(self) -> RewardWeights:
        if abs(self.validation + self.quality + self.speed - 1.0) > 1e-9:
            raise ValueError("validation + quality + speed must be 1; scale the three weights")
        shares = self.by_attempt
        falling = all(a >= b for a, b in pairwise(shares))
        if not shares or not falling or shares[0] > 1 or shares[-1] < 0:
            raise ValueError("by_attempt must fall from at most 1 to at least 0, one per attempt")
        return self

    @property
    def max_attempts(self) -> int:
        """Submissions an episode may make."""
        return len(self.by_attempt)


class Terms(Frozen):
    """One reward with everything it was made of."""

    kind: RewardKind
    validation: float = 0.0
    """In [0, 1]."""
    quality: float = 0.0
    """In [-1, 1]."""
    speed: float = 0.0
    """In [0, 1]."""
    post: float | None = None
    """Trained score that entered quality; None when there was none."""
    uplift: float | None = None
    """The uplift part of quality: `uplift_term` for seed, `shown_gain` for paired."""
    no_submission: bool = False
    """The fixed price of an episode without a readable submission replaced all terms."""
    total: float
    """The reward."""


def compute_terms(
    outcome: Outcome | None,
    *,
    valid_attempt: int | None,
    submitted: bool,
    budget_share: float,
    weights: RewardWeights | None = None,
) -> dict[RewardKind, Terms]:
    """Both rewards of one episode.

    Args:
        outcome: what became of the accepted job; None when there was none or its record was lost.
        valid_attempt: which attempt passed the probe, from 1; None when none did.
        submitted: at least one submission could be read (froze, and its job.toml is TOML).
        budget_share: part of the largest allowed number of rollouts the job used, 0 to 1.
        weights: the enforced numbers.
    """
    used = weights or RewardWeights()
    arguments = (outcome, valid_attempt, submitted, budget_share, used)
    return {"seed": seed_reward(*arguments), "paired": paired_reward(*arguments)}


def seed_reward(
    outcome: Outcome | None,
    valid_attempt: int | None,
    submitted: bool,
    budget_share: float,
    weights: RewardWeights,
) -> Terms:
    """The published formula; a job that died keeps its validation term and nothing else."""
    if not submitted:
        return _nothing_submitted("seed", weights)
    validation = _validation(valid_attempt, weights)
    scores = _scores(outcome)
    if valid_attempt is None or scores is None:
        return _total(weights, kind="seed", validation=validation)
    post, best_pre = scores
    uplift = uplift_term(post, best_pre)
    quality = weights.post_share * post + (1 - weights.post_share) * uplift
    return _total(
        weights,
        kind="seed",
        validation=validation,
        quality=quality,
        speed=_speed(budget_share),
        post=post,
        uplift=uplift,
    )


def paired_reward(
    outcome: Outcome | None,
    valid_attempt: int | None,
    submitted: bool,
    budget_share: float,
    weights: RewardWeights,
) -> Terms:
    """Validation plus what training is shown to have added; speed only when it added something.

    Quality is the paired uplift shrunk towards 0 by the half-width of its 95 % interval (soft
    threshold), so it is 0 exactly when the interval covers 0. A job whose weights did not change has
    quality 0. Death in the agent's own code withholds the validation term too.
    """
    if not submitted:
        return _nothing_submitted("paired", weights)
    validation = _validation(valid_attempt, weights)
    if outcome is not None and outcome.status != "succeeded" and _is_agent_fault(outcome, weights):
        validation = 0.0
    scores = _scores(outcome)
    if valid_attempt is None or outcome is None or scores is None:
        return _total(weights, kind="paired", validation=validation)
    post, best_pre = scores
    untouched = outcome.final_hash is not None and outcome.final_hash == outcome.base_hash
    gain = 0.0 if untouched else shown_gain(outcome.uplift_ci, best_pre)
    return _total(
        weights,
        kind="paired",
        validation=validation,
        quality=gain,
        speed=_speed(budget_share) if gain > 0 else 0.0,
        post=post,
        uplift=gain,
    )


def uplift_term(post: float, best_pre: float) -> float:
    """Signed uplift: share of the room above `best_pre` gained, or of `best_pre` lost; in [-1, 1]."""
    delta = post - best_pre
    if delta > 0:
        return min(1.0, delta / (1 - best_pre))
    return max(-1.0, delta / best_pre) if delta < 0 else 0.0


def shown_gain(uplift_ci: tuple[float, float] | None, best_pre: float) -> float:
    """The end of the interval nearer to 0 as a signed uplift; 0 when it covers 0 or is missing."""
    if uplift_ci is None:
        return 0.0
    low, high = uplift_ci
    nearer = low if low > 0 else min(high, 0.0)
    return uplift_term(min(1.0, max(0.0, best_pre + nearer)), best_pre)


def no_op_reward(
    best_pre: float, *, kind: RewardKind = "seed", weights: RewardWeights | None = None
) -> float:
    """The line to beat: a job valid at once that leaves the best base as it is, at no cost.

    Under `seed` this is 0.35 + 0.15 best_pre + 0.05: 0.48 on the mean over the published families
    with the speed term and 0.43 without it.
    """
    used = weights or RewardWeights()
    if kind == "paired":
        return used.validation * used.by_attempt[0]
    return (
        used.validation * used.by_attempt[0]
        + used.quality * used.post_share * best_pre
        + used.speed
    )


def _nothing_submitted(kind: RewardKind, weights: RewardWeights) -> Terms:
    return Terms(kind=kind, no_submission=True, total=weights.no_submission)


def _validation(valid_attempt: int | None, weights: RewardWeights) -> float:
    if valid_attempt is None:
        return 0.0
    if not 1 <= valid_attempt <= weights.max_attempts:
        raise ValueError(
            f"attempt {valid_attempt} does not exist; expected 1 to {weights.max_attempts}"
        )
    return weights.by_attempt[valid_attempt - 1]


def _scores(outcome: Outcome | None) -> tuple[float, float] | None:
    """Trained score and best untrained score of a job that lived, else None."""
    if outcome is None or outcome.status != "succeeded":
        return None
    if outcome.post is None or outcome.best_pre is None:
        return None
    return outcome.post, outcome.best_pre


def _is_agent_fault(outcome: Outcome, weights: RewardWeights) -> bool:
    reason = outcome.reason
    return reason.startswith(weights.agent_fault_reasons) and not reason.startswith(
        weights.machine_fault_reasons
    )


def _speed(budget_share: float) -> float:
    return 1.0 - min(1.0, max(0.0, budget_share))


def _total(
    weights: RewardWeights,
    *,
    kind: RewardKind,
    validation: float,
    quality: float = 0.0,
    speed: float = 0.0,
    post: float | None = None,
    uplift: float | None = None,
) -> Terms:
    total = weights.validation * validation + weights.quality * quality + weights.speed * speed
    return Terms(
        kind=kind,
        validation=validation,
        quality=quality,
        speed=speed,
        post=post,
        uplift=uplift,
        total=total,
    )
