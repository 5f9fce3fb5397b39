"""The no-op reference: an untrained base handed in as its own result."""

from __future__ import annotations

import hashlib

from nestling.inner.run import InnerContext
from nestling.inner.statistics import paired_difference
from nestling.jobs.outcome import Outcome

__all__ = ["noop_outcome"]


def noop_outcome(base: str, family: str, context: InnerContext) -> Outcome:
    """What a job that changes nothing on `base` scores; costs nothing once baselines are stored.

    Scoring is a function of weights, items and seeds, so the post-score is the frozen pre-score.
    """
    context.scorer.start()
    pre = context.baselines.get(base, family, context.split, context.n)
    best = context.baselines.best_base(family, context.split, context.n)
    uplift = paired_difference(pre.correct, best.correct)
    return Outcome(
        job_hash=hashlib.sha256(f"noop {base} {family}".encode()).hexdigest(),
        family=family,
        base_model=base,
        status="succeeded",
        pre=pre.mean,
        best_pre=best.mean,
        post=pre.mean,
        uplift=uplift.mean,
        uplift_ci=(uplift.lo, uplift.hi),
        n=uplift.n,
        delta_norm=0.0,
    )
