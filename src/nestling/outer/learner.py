"""What the outer loop needs of the thing that learns: sample, update, publish, save.

Six methods, token ids in and token ids out. The loop never sees tensors, so a learner may live in
this process, on a GPU next door or behind a paid service. A learner raises `LearnerError` for
everything it cannot do; nothing else crosses this border except cancellation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nestling.outer.config import LossKind

__all__ = ["Handle", "Learner", "LossSpec", "LossStats", "Sampled", "StepStats", "TrainRow"]


class Handle(Protocol):
    """One published policy: immutable, usable until the last reference to it is gone."""

    @property
    def version(self) -> int:
        """Updates in these weights; 0 is the initial policy."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One sampled turn."""

    ids: list[int]
    """Sampled tokens, the turn-end token included when there is one."""
    logprobs: list[float]
    """Of the distribution they were drawn from, temperature applied; same length as `ids`."""
    stopped: bool
    """True when the turn ended by itself, False when it was cut at `max_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRow:
    """One episode as training data; all lists have one entry per token."""

    ids: list[int]
    sampled: list[bool]
    """True for tokens the policy chose; all others carry no loss."""
    logprobs: list[float]
    """Log-probability at sampling time; ignored where `sampled` is False."""
    advantage: float
    staleness: int = 0
    """Updates made between sampling this row and training on it."""
    group: int = 0
    member: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """The objective of one update; a mean over the sampled tokens of all rows.

    `importance_sampling`: -advantage * exp(logp - logp_at_sampling).
    `ppo_clip`: the pessimistic minimum with the ratio clipped to 1 -+ `clip` (Schulman et al. 2017).
    """

    kind: LossKind = "importance_sampling"
    clip: float = 0.2
    kl_coef: float = 0.0
    """Weight of the divergence from the initial policy."""
    temperature: float = 1.0
    """Temperature of every log-probability in the loss: the one the rows were sampled at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStats:
    """What `forward_backward` saw; means over sampled tokens. None: this learner cannot tell."""

    loss: float
    num_tokens: int
    """Sampled tokens in the batch."""
    kl_sampler: float | None = None
    """Mean of log-probability at sampling minus log-probability now."""
    kl_initial: float | None = None
    """Estimated divergence from the initial policy."""
    nll: float | None = None
    """Mean negative log-probability of the sampled tokens: an estimate of the entropy."""
    clipped_share: float | None = None
    """Share of tokens whose ratio the loss clipped."""
    max_logprob_gap: float | None = None
    """Largest distance between log-probability at sampling and now; about 0 right after sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What `optim_step` did."""

    version: int
    """Updates made so far, this one included."""
    learning_rate: float
    grad_norm: float | None = None
    """Before clipping."""


class Learner(Protocol):
    """A policy that can be sampled and trained.

    Calls to `forward_backward`, `optim_step`, `publish`, `save` and `load` take effect in the order
    they are made; the caller has at most one of them in flight. `sample` may run beside them and
    any number of times at once, on any published handle: an update never changes what a handle
    samples. Every method may be cancelled; a cancelled `sample` changes nothing, after any other
    cancelled call the learner's state is unknown and the caller must `load`.
    """

    async def sample(
        self,
        handle: Handle,
        ids: Sequence[int],
        *,
        session: str,
        seed: int,
        max_tokens: int,
        temperature: float,
    ) -> Sampled:
        """Continue `ids` until the turn ends or `max_tokens` tokens were drawn.

        `session` names the conversation, so that a learner may keep its cache between turns; it
        never changes the answer. The answer depends on the handle, `ids`, `seed`, `max_tokens` and
        `temperature` alone, as far as the backend's arithmetic allows. May be repeated.
        """
        ...

    async def forward_backward(self, rows: Sequence[TrainRow], loss: LossSpec) -> LossStats:
        """Add the gradient of the loss over `rows` to what is pending. Not to be repeated.

        Raises `LearnerError` for no rows, or rows without a sampled token.
        """
        ...

    async def optim_step(self, lr: float) -> StepStats:
        """Apply the pending gradient once and clear it. Not to be repeated.

        Raises `LearnerError` when nothing is pending or the gradient is not finite; the weights are
        then unchanged.
        """
        ...

    async def publish(self) -> Handle:
        """An immutable policy with the current weights. May be repeated."""
        ...

    async def save(self, name: str) -> str:
        """Write weights, optimiser and version durably under `name`; returns what `load` takes.

        All or nothing: a crash leaves the old state or the new one. Saving under a name again
        replaces it. A pending gradient is not saved.
        """
        ...

    async def load(self, ref: str) -> None:
        """Go back to a saved state; afterwards the same calls give the same numbers as then.

        Drops a pending gradient; handles published before stay valid. May be repeated.
        Raises `LearnerError` when the state is missing, damaged or of another model.
        """
        ...
