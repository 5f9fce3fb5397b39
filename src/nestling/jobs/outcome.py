"""What became of a job: one record, the same for success, failure and death."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nestling.core.frozen import Frozen

__all__ = ["Outcome", "OutcomeStatus", "SampleRollout", "StepRecord", "WarmUp"]

OutcomeStatus = Literal["succeeded", "failed", "timed_out", "lost"]
"""failed: the job itself died; timed_out: a stage deadline; lost: worker died too often."""


class SampleRollout(Frozen):
    """One training rollout of the small model, for people to read."""

    text: str
    """Prompt, turns and tool answers with their chat markup; cut where it is very long."""
    reward: float
    """What the job's own rubric gave it."""


class StepRecord(Frozen):
    """One inner training step as the trainer saw it."""

    step: int
    reward_mean: float
    """Mean of the job's own reward over the batch."""
    reward_std: float
    loss: float | None
    """None when every group was constant and no update was made."""
    grad_norm: float | None
    kl: float | None
    """Mean of sampler minus learner log-probability over action tokens."""
    learning_rate: float
    trained_groups: int
    """Groups with a non-zero advantage."""
    rollout_tokens: int
    cpu_s: float
    samples: tuple[SampleRollout, ...] = ()
    """Of the first step, played by the untrained weights, and of the last; else empty."""


class WarmUp(Frozen):
    """The supervised steps of a job's `[sft]` table."""

    steps: int
    examples: int
    """Worked examples that were used."""
    first_loss: float
    """Mean cross-entropy per token of the model's turns, before the first step."""
    last_loss: float
    """Before the last step."""
    cpu_s: float


class Outcome(Frozen):
    """The record of one job; missing scores are None, never a sentinel."""

    job_hash: str
    family: str
    base_model: str
    status: OutcomeStatus
    reason: str = ""
    """Stable reason code when not succeeded, for example `env.crashed`."""
    detail: str = ""
    """One or two lines for a person or the agent."""
    pre: float | None = None
    """Score of the chosen base, untrained, on set B."""
    best_pre: float | None = None
    """Score of the best untrained base on the same items and seeds."""
    post: float | None = None
    uplift: float | None = None
    """post - best_pre, paired over items."""
    uplift_ci: tuple[float, float] | None = None
    """95 % interval of the paired mean difference."""
    n: int = 0
    """Hidden items scored."""
    train_steps: int = 0
    steps: tuple[StepRecord, ...] = ()
    warm_up: WarmUp | None = None
    base_hash: str | None = None
    final_hash: str | None = None
    delta_norm: float | None = None
    """Euclidean norm of trained minus base weights."""
    model_ref: str | None = None
    """Where the trained weights are, relative to the artifact store."""
    cpu_s: float = Field(0.0, ge=0)
    wall_s: float = Field(0.0, ge=0)
    usd: float = Field(0.0, ge=0)
