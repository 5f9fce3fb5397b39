"""Rows to what a Tinker service trains on, and its answer to statistics. Pure; numpy only.

Axes: T predicted token of one row, T = len(ids) - 1. Position t predicts ids[t + 1].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nestling.outer.learner import LossSpec, LossStats, TrainRow
from nestling.outer.learners.tinker_faults import TinkerFaultError
from nestling.outer.learners.tinker_service import Datum

__all__ = ["datum", "stats"]


def datum(row: TrainRow, *, kl_coef: float = 0.0, reference_T: np.ndarray | None = None) -> Datum:
    """What is sent for a row: zeros wherever nothing was sampled.

    With `reference_T` each token's advantage loses kl_coef * (1 - exp(reference - logp)), the gradient
    of the estimator exp(d) - d - 1, d = reference - logp, at the policy that sampled.
    """
    sampled_T = np.asarray(row.sampled[1:], dtype=bool)
    logprobs_T = np.where(sampled_T, np.asarray(row.logprobs[1:], dtype=np.float64), 0.0)
    advantages_T = np.where(sampled_T, row.advantage, 0.0)
    if reference_T is not None:
        pull_T = 1.0 - np.exp(np.where(sampled_T, reference_T - logprobs_T, 0.0))
        advantages_T = advantages_T - kl_coef * pull_T
    return Datum(
        ids=list(row.ids),
        logprobs=logprobs_T.astype(np.float32),
        advantages=advantages_T.astype(np.float32),
    )


def stats(
    rows: Sequence[TrainRow],
    logprobs: Sequence[np.ndarray],
    loss: LossSpec,
    references: Sequence[np.ndarray] | None = None,
) -> LossStats:
    """Means over sampled tokens, from the log-probabilities the service found.

    Raises:
        TinkerFaultError: they do not fit the rows, or are not finite.
    """
    now, old, advantage, reference = [], [], [], []
    for number, (row, found_T) in enumerate(zip(rows, logprobs, strict=True)):
        if found_T.shape != (len(row.ids) - 1,):
            raise TinkerFaultError(
                "failed",
                f"forward_backward gave {found_T.shape} log-probabilities for {len(row.ids)} tokens",
            )
        sampled_T = np.asarray(row.sampled[1:], dtype=bool)
        now.append(found_T[sampled_T].astype(np.float64))
        old.append(np.asarray(row.logprobs[1:], dtype=np.float64)[sampled_T])
        advantage.append(np.full(int(sampled_T.sum()), row.advantage))
        if references is not None:
            reference.append(references[number][sampled_T].astype(np.float64))
    now_K, old_K, advantage_K = map(np.concatenate, (now, old, advantage))
    if not np.isfinite(now_K).all():
        raise TinkerFaultError(
            "failed", "forward_backward gave log-probabilities that are not finite"
        )
    ratio_K = np.exp(now_K - old_K)
    gain_K, clipped = ratio_K * advantage_K, 0.0
    if loss.kind == "ppo_clip":
        bounded_K = np.clip(ratio_K, 1 - loss.clip, 1 + loss.clip) * advantage_K
        clipped = float((bounded_K < gain_K).mean())
        gain_K = np.minimum(gain_K, bounded_K)
    kl = None
    if references is not None:
        gap_K = np.concatenate(reference) - now_K
        kl = float((np.exp(gap_K) - gap_K - 1).mean())
    return LossStats(
        loss=float(-gain_K.mean()) + loss.kl_coef * (kl or 0.0),
        num_tokens=len(now_K),
        kl_sampler=float((old_K - now_K).mean()),
        kl_initial=kl,
        nll=float(-now_K.mean()),
        clipped_share=clipped,
        max_logprob_gap=float(np.abs(old_K - now_K).max()),
    )
