"""What is reported of a training step: per job its loss, how far it is from the sampler, its gradient.

Axes: J job, K predicted token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestling.engine.batching import MicroBatch
from nestling.engine.packing import PackedBatch

__all__ = ["LossStats", "LossTotals", "StepStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStats:
    """One job's batch; means are over its action tokens."""

    loss: float
    num_rows: int
    """Rows with a non-zero advantage (or cross-entropy weight): the ones trained on."""
    num_tokens: int
    """Action tokens, the normaliser."""
    mean_abs_ratio_minus_1: float
    """How far the learner's probabilities are from the sampler's; about 0 right after sampling."""
    max_abs_logp_diff: float
    dropped_fraction: float
    """Tokens clipped or dropped by the trust region."""
    mean_logp: float
    """Its negative estimates the policy's entropy per token."""
    reference_kl: float
    ce_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One optimiser step of one job."""

    lr: float
    grad_norm: float
    """Before clipping."""
    updated: bool
    """False when no row carried a gradient: weights and optimiser state are untouched."""
    step: int
    """Optimiser steps taken so far by the trainer."""


class LossTotals:
    """Sums over a batch's micro-batches, kept on the device until the end."""

    def __init__(self, num_jobs: int, device: torch.device) -> None:
        self._sums = torch.zeros(7, num_jobs, device=device)

    def add(
        self,
        batch: MicroBatch | PackedBatch,
        logp: Tensor,
        dropped: Tensor,
        policy_J: Tensor,
        ce_J: Tensor,
        kl: Tensor | None,
        jobs: Tensor | None = None,
    ) -> None:
        """Add a micro-batch of all jobs, or of those whose numbers are given."""
        action = batch.action > 0
        diff = torch.where(action, logp - batch.old_logp, 0.0)
        sums = self._sums if jobs is None else self._sums[:, jobs]
        sums[0] += policy_J + ce_J
        sums[1] += (diff.exp() - 1).abs().sum(1)
        sums[2] = torch.maximum(sums[2], diff.abs().amax(1))
        sums[3] += (dropped & action).sum(1)
        sums[4] += torch.where(action, logp, 0.0).sum(1)
        if kl is not None:
            sums[5] += torch.where(action, kl.detach(), 0.0).sum(1)
        sums[6] += ce_J
        if jobs is not None:
            self._sums[:, jobs] = sums

    def stats(self, num_rows: list[int], tokens: list[float]) -> list[LossStats]:
        """Per job, given its rows and action tokens."""
        found = []
        for j, (loss, ratio, diff, dropped, logp, kl, ce) in enumerate(self._sums.T.tolist()):
            count = max(tokens[j], 1.0)
            found.append(
                LossStats(
                    loss=loss,
                    num_rows=num_rows[j],
                    num_tokens=int(tokens[j]),
                    mean_abs_ratio_minus_1=ratio / count,
                    max_abs_logp_diff=diff,
                    dropped_fraction=dropped / count,
                    mean_logp=logp / count,
                    reference_kl=kl / count,
                    ce_loss=ce,
                )
            )
        return found
