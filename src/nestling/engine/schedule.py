"""Learning-rate schedules with the meaning they have in prime-rl (`trainer/scheduler.py`, August 2026)."""

from __future__ import annotations

import math
from typing import Literal

from nestling.core.errors import ConfigError

__all__ = ["SchedulerName", "learning_rate"]

SchedulerName = Literal["constant", "linear", "cosine"]
_ALMOST_ZERO = 1e-8
"""Warm-up and decay end here, as a share of `lr`, when `min_lr` is 0."""


def learning_rate(
    step: int,
    *,
    lr: float,
    scheduler: SchedulerName = "constant",
    warmup_steps: int = 10,
    max_steps: int | None = None,
    decay_steps: int = 10,
    min_lr: float = 0.0,
) -> float:
    """The rate of optimiser step `step`, counted from 0.

    `constant` ignores the other arguments. `linear` climbs from `min_lr` to `lr` during the first
    `warmup_steps`, stays, and falls to `min_lr` over the last `decay_steps`; `cosine` climbs in the same way
    and then follows half a cosine down to `min_lr` at `max_steps`. So with a warm-up and `min_lr` 0 the very
    first step has a rate of almost nothing, as upstream.
    """
    if scheduler == "constant":
        return lr
    if scheduler not in ("linear", "cosine"):
        raise ConfigError(f"scheduler={scheduler!r}; expected constant, linear or cosine")
    _check(scheduler, warmup_steps, max_steps, decay_steps)
    low = min_lr / lr if min_lr > 0 and lr > 0 else _ALMOST_ZERO
    if step < warmup_steps:
        return lr * (low + (1 - low) * step / warmup_steps)
    if scheduler == "cosine":
        assert max_steps is not None
        done = min(1.0, (step - warmup_steps) / (max_steps - warmup_steps))
        return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * done)) / 2
    if decay_steps == 0 or max_steps is None or step < max_steps - decay_steps:
        return lr
    if (
        decay_steps == 1
    ):  # the one decay step is the first of its phase, which still has the full rate
        return lr
    done = min(1.0, (step - (max_steps - decay_steps)) / (decay_steps - 1))
    return lr * (1 + (low - 1) * done)


def _check(scheduler: str, warmup_steps: int, max_steps: int | None, decay_steps: int) -> None:
    if scheduler == "cosine":
        if max_steps is None or warmup_steps >= max_steps:
            raise ConfigError(
                f"cosine with warmup_steps={warmup_steps} and max_steps={max_steps}; "
                "expected warmup_steps below max_steps"
            )
        return
    if warmup_steps == 0 and decay_steps == 0:
        raise ConfigError(
            "linear with warmup_steps=0 and decay_steps=0 does nothing; "
            "set one of them, or use the constant scheduler"
        )
    if decay_steps > 0 and (max_steps is None or warmup_steps + decay_steps > max_steps):
        raise ConfigError(
            f"linear with warmup_steps={warmup_steps} + decay_steps={decay_steps} and "
            f"max_steps={max_steps}; expected their sum to be at most max_steps"
        )
