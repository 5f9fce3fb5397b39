"""Policy losses per token, as pure functions.

Axes: J job, K action token of a batch. Every function takes the learner's log-probability, the sampler's
log-probability and the advantage, each [J, K], and gives the loss of each token and which tokens its trust
region dropped. Masking and the normaliser (action tokens of the whole batch) are the caller's.

Write r = exp(logp - old), A the advantage, p = exp(logp), q = exp(old).
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from nestling.core.frozen import Frozen

__all__ = [
    "Dppo",
    "ImportanceSampling",
    "Ipo",
    "LossConfig",
    "PpoClip",
    "reference_kl",
    "token_loss",
]


class ImportanceSampling(Frozen):
    """-r A: the policy gradient corrected for the sampler's distribution, without a trust region.

    Tinker's `importance_sampling` loss.
    """

    kind: Literal["importance_sampling"] = "importance_sampling"


class PpoClip(Frozen):
    """-min(r A, clip(r, 1 - low, 1 + high) A): Schulman et al. 2017, arXiv:1707.06347, equation 7."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(default=0.2, ge=0, le=1)
    clip_high: float = Field(default=0.2, ge=0)


class Dppo(Frozen):
    """prime-rl's `default` loss (`trainer/rl/loss.py`, `default_loss_fn`, August 2026).

    -keep * adv_tau * A * r + kl_tau * log(r)^2. A token is not kept (its first term is dropped) when its
    probability has already moved too far the way its advantage pushes it: p - q > dppo_mask_high where A > 0,
    p - q < -dppo_mask_low where A <= 0. The distance is the change of probability itself, not a ratio, so
    rare tokens are not clipped early (arXiv:2602.04879). The squared log-ratio holds every action token near
    the sampler, kept or not (arXiv:2602.02276).
    """

    kind: Literal["dppo"] = "dppo"
    dppo_mask_low: float = Field(default=0.2, ge=0)
    dppo_mask_high: float = Field(default=0.2, ge=0)
    adv_tau: float = Field(default=1.0, ge=0)
    kl_tau: float = Field(default=1e-3, ge=0)


class Ipo(Frozen):
    """prime-rl's `ipo` loss (`trainer/rl/loss.py`, `ipo_loss_fn`, August 2026).

    As `dppo`, with one symmetric condition: a token is dropped when |p - q| > ipo_threshold, whatever the
    sign of its advantage.
    """

    kind: Literal["ipo"] = "ipo"
    ipo_threshold: float = Field(default=0.1, ge=0)
    adv_tau: float = Field(default=1.0, ge=0)
    kl_tau: float = Field(default=1e-3, ge=0)


LossConfig = Annotated[ImportanceSampling | PpoClip | Dppo | Ipo, Field(discriminator="kind")]


def token_loss(
    config: ImportanceSampling | PpoClip | Dppo | Ipo,
    logp_JK: Tensor,
    old_logp_JK: Tensor,
    advantage_JK: Tensor,
) -> tuple[Tensor, Tensor]:
    """Loss [J, K] and the tokens the trust region dropped or clipped [J, K]."""
    log_ratio = logp_JK - old_logp_JK
    ratio = log_ratio.exp()
    if isinstance(config, ImportanceSampling):
        return -ratio * advantage_JK, torch.zeros_like(ratio, dtype=torch.bool)
    if isinstance(config, PpoClip):
        plain = ratio * advantage_JK
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage_JK
        return -torch.minimum(plain, clipped), clipped < plain
    with torch.no_grad():
        moved = logp_JK.exp() - old_logp_JK.exp()
        if isinstance(config, Dppo):
            dropped = torch.where(
                advantage_JK > 0, moved > config.dppo_mask_high, moved < -config.dppo_mask_low
            )
        else:
            dropped = moved.abs() > config.ipo_threshold
    gain = torch.where(dropped, 0.0, config.adv_tau * advantage_JK * ratio)
    return config.kl_tau * log_ratio.square() - gain, dropped


def reference_kl(logp_JK: Tensor, reference_JK: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) from the sampled token: exp(d) - d - 1, d = reference - logp.

    Never negative and unbiased for samples of the policy; the KL term of Shao et al. 2024, arXiv:2402.03300,
    equation 4. Both log-probabilities are of one temperature.
    """
    gap = reference_JK - logp_JK
    return gap.exp() - gap - 1
