"""Advantages of grouped rollouts. numpy only.

Axes: P prompt, G rollout of one prompt's group. Names and formulas follow prime-rl (`orchestrator/algo/`,
August 2026):

- `grpo`: reward minus its group's mean; there is no division by the spread upstream, `std_normalise` adds it
  (Shao et al. 2024, arXiv:2402.03300, equation 3 and text).
- `max_rl`: (reward - group mean) / group mean, and zero where the mean is not positive (arXiv:2602.02710).
- `echo`: the advantages of `grpo`; the other half of the method, cross-entropy on tool results, is the
  per-token weight that `observation_weights` makes.
- `rae`: reward minus an exponential moving average of earlier rewards (SPIRAL, arXiv:2506.24119). Upstream
  keeps one average per agent of the environment; a single-agent job has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from nestling.core.errors import ConfigError

__all__ = [
    "Algo",
    "EmaBaseline",
    "LengthPenalty",
    "RolloutLengths",
    "group_advantages",
    "observation_weights",
]

Algo = Literal["grpo", "max_rl", "echo", "rae"]
_Array = npt.NDArray[np.float64]
_ZERO = 1e-8
"""Advantages below this are rounding, not signal: a constant group gives exact zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPenalty:
    """Share of the group's mean reward taken off for length, before the baseline.

    Each term is the rollout's quantity over the largest of its group; a successful group is thus pushed
    towards short rollouts and a failing one is left alone. Defaults are upstream's.
    """

    output_tokens_weight: float = 0.25
    input_tokens_weight: float = 0.1
    turns_weight: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLengths:
    """What a length penalty needs of every rollout, each [P, G]."""

    output_tokens: npt.ArrayLike
    """Sampled tokens."""
    input_tokens: npt.ArrayLike
    """All other tokens: prompt and tool results."""
    turns: npt.ArrayLike


@dataclass(slots=True)
class EmaBaseline:
    """The running baseline of `rae`; starts at zero and belongs to one training run."""

    decay: float = 0.95
    value: float = 0.0


def group_advantages(
    rewards_PG: npt.ArrayLike,
    algo: Algo = "grpo",
    *,
    std_normalise: bool = False,
    length_penalty: LengthPenalty | None = None,
    lengths: RolloutLengths | None = None,
    baseline: EmaBaseline | None = None,
) -> _Array:
    """Advantages [P, G]; the same number holds for every sampled token of a rollout.

    `rae` walks the rewards in row order, scores each before it moves the baseline, and changes `baseline`.
    ConfigError: unknown algorithm, wrong shape, rewards that are not finite, a length penalty with another
    algorithm than grpo and echo or without lengths, `rae` without a baseline.
    """
    rewards = np.asarray(rewards_PG, np.float64)
    if rewards.ndim != 2 or not np.isfinite(rewards).all():
        raise ConfigError(
            f"rewards have shape {rewards.shape} or are not finite; expected finite [prompts, group size]"
        )
    if length_penalty is not None:
        if algo not in ("grpo", "echo"):
            raise ConfigError(f"algo={algo!r} takes no length penalty; only grpo and echo do")
        rewards = rewards - _penalty(rewards, length_penalty, lengths)
    if algo in ("grpo", "echo"):
        return _centred(rewards, std_normalise)
    if algo == "max_rl":
        mean = rewards.mean(1, keepdims=True)
        safe = np.where(mean > 0, mean, 1.0)
        return _clean(np.where(mean > 0, (rewards - mean) / safe, 0.0))
    if algo == "rae":
        if baseline is None:
            raise ConfigError("algo='rae' needs the run's EmaBaseline; pass baseline=")
        return _against_average(rewards, baseline)
    raise ConfigError(f"algo={algo!r}; expected grpo, max_rl, echo or rae")


def observation_weights(sampled: Sequence[bool], alpha: float = 0.1) -> list[float]:
    """Cross-entropy weight per token for `echo`: alpha on what came back after the first sampled turn.

    Upstream leaves out the chat markup around a tool result where its renderer can tell it apart, and
    weights the whole span where it cannot; here it is always the whole span.
    """
    seen, weights = False, []
    for flag in sampled:
        weights.append(alpha if seen and not flag else 0.0)
        seen = seen or flag
    return weights


def _centred(rewards: _Array, std_normalise: bool) -> _Array:
    advantages = _clean(rewards - rewards.mean(1, keepdims=True))
    if std_normalise:
        advantages = advantages / (advantages.std(1, keepdims=True) + 1e-4)
    return advantages


def _clean(advantages: _Array) -> _Array:
    return np.where(np.abs(advantages) < _ZERO, 0.0, advantages)


def _penalty(rewards: _Array, penalty: LengthPenalty, lengths: RolloutLengths | None) -> _Array:
    if lengths is None:
        raise ConfigError("a length penalty needs the rollouts' lengths; pass lengths=")
    total = np.zeros_like(rewards)
    for weight, values in (
        (penalty.output_tokens_weight, lengths.output_tokens),
        (penalty.input_tokens_weight, lengths.input_tokens),
        (penalty.turns_weight, lengths.turns),
    ):
        amount = np.asarray(values, np.float64)
        if amount.shape != rewards.shape:
            raise ConfigError(
                f"lengths have shape {amount.shape}; expected {rewards.shape} as rewards"
            )
        total += weight * amount / np.maximum(amount.max(1, keepdims=True), 1.0)
    penalty_PG: _Array = rewards.mean(1, keepdims=True) * total
    return penalty_PG


def _against_average(rewards: _Array, baseline: EmaBaseline) -> _Array:
    advantages = np.empty_like(rewards)
    flat, out = rewards.reshape(-1), advantages.reshape(-1)
    for i, reward in enumerate(flat.tolist()):
        out[i] = reward - baseline.value
        baseline.value = baseline.decay * baseline.value + (1 - baseline.decay) * reward
    return _clean(advantages)
