"""What a template job costs, part by part: CPU seconds of sampling, learning, environment and evaluation.

The whole of `inner.run` on the machine room's own parts. Baselines are computed before and count for no job, as in
a run. The parts add up to what the job is charged.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any, Final

from nestling.bench.cpu_clock import timed
from nestling.bench.progress import tell
from nestling.bench.record import Measured
from nestling.bench.room import room_here
from nestling.config import RunConfig
from nestling.core.errors import ConfigError
from nestling.engine.learn import PolicyTrainer
from nestling.families.registry import TRAINING
from nestling.inner.run import InnerContext, run_job
from nestling.inner.trainer import StepLog, Trainer, TrainLimits, TrainRequest, TrainResult
from nestling.jobs.env_client import JailedEnv
from nestling.jobs.spot_checks import SpotChecks
from nestling.jobs.template import template_job

__all__ = ["PARTS", "measure"]

PARTS: Final = {
    "sampling_s": "prompts, decoding, advantages, loading and saving the model",
    "learning_s": "gradients and optimiser steps",
    "pipe_s": "the trainer's end of the pipes, spot checks included",
    "worker_s": "the jailed environment and its reference: start, rows, tools, scoring",
    "eval_s": "scoring the trained model on hidden items",
}
"""Part of a job's CPU seconds to what it holds."""

_UNHURRIED: Final = TrainLimits(wall_s=7200.0)
"""Processor time is measured, so a busy machine may take its time."""
_ENV_METHODS: Final = ("rows", "reset", "step", "score")
_COLUMNS: Final = ("family", "CPU s", *PARTS, "wall s")


def measure(
    config: RunConfig | None = None, *, families: Sequence[str] = TRAINING, runs: int = 5
) -> Measured:
    """The template job of each family, trained and scored in this process tree.

    Args:
        config: hidden items per score and limits; the default recipe when None.
        families: names.
        runs: jobs per family, each with a training seed of its own, at least one.

    Raises:
        ConfigError: fewer than one run, or the jail is missing.
        RuntimeError: a template job did not succeed.
    """
    if runs < 1:
        raise ConfigError(f"runs={runs}; expected at least 1, 5 for figures to be compared")
    used = config or RunConfig()
    rows: list[dict[str, Any]] = []
    with room_here(used) as room:
        for family in families:
            room.context.baselines.best_base(family, room.context.split, room.context.n)
            for seed in range(runs):
                tell(f"{family} {seed}")
                rows.append(_one(family, replace(room.context, seed=seed)))
    by_family = {
        family: {
            name: round(median(row[name] for row in rows if row["family"] == family), 3)
            for name in ("cpu_s", *PARTS, "wall_s")
        }
        for family in families
    }
    return Measured(
        settings={
            "families": list(families),
            "runs": runs,
            "items": used.inner.eval_items,
            "parts": PARTS,
        },
        runs=tuple(rows),
        figures={"by_family": by_family, "cpu_s_max": max(f["cpu_s"] for f in by_family.values())},
        columns=_COLUMNS,
        rows=tuple(
            (family, *(f"{figures[name]:.2f}" for name in ("cpu_s", *PARTS, "wall_s")))
            for family, figures in by_family.items()
        ),
    )


class _Watched:
    """A trainer whose own processor time and result are kept; satisfies `Trainer`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.own_s = 0.0
        self.cpu_s = 0.0

    def train(self, request: TrainRequest, log: StepLog) -> TrainResult:
        """See `Trainer.train`."""
        started_s = time.process_time()
        result = self._trainer.train(request, log)
        self.own_s = time.process_time() - started_s
        self.cpu_s = result.cpu_s
        return result


def _one(family: str, context: InnerContext) -> dict[str, Any]:
    watched = _Watched(context.trainer)
    with ExitStack() as stack:
        learning = stack.enter_context(timed(PolicyTrainer, "forward_backward", "optim_step"))
        pipe = stack.enter_context(timed(JailedEnv, *_ENV_METHODS))
        checks = stack.enter_context(timed(SpotChecks, *_ENV_METHODS))
        outcome = run_job(
            template_job(family),
            family,
            replace(context, trainer=watched, limits=_UNHURRIED),
            lambda _: None,
        )
    if outcome.status != "succeeded":
        raise RuntimeError(f"the template job of {family} ended with {outcome.reason}")
    pipe_s = max(pipe(), checks())  # with spot checks every call goes through them
    return {
        "family": family,
        "seed": context.seed,
        "cpu_s": round(outcome.cpu_s, 3),
        "sampling_s": round(watched.own_s - learning() - pipe_s, 3),
        "learning_s": round(learning(), 3),
        "pipe_s": round(pipe_s, 3),
        "worker_s": round(max(0.0, watched.cpu_s - watched.own_s), 3),
        "eval_s": round(outcome.cpu_s - watched.cpu_s, 3),
        "wall_s": round(outcome.wall_s, 2),
        "uplift": outcome.uplift,
    }
