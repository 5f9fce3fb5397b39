"""GRPO on our own engine: play, score by the job's rubric, compare within groups, update.

Every `[prime_rl]` key keeps its meaning (`jobs.bounds`). Rollouts always come from the weights
that are updated with them, so the staleness that `max_off_policy_steps` limits is zero here, and
`enable_thinking` has nothing to switch because our chat markup has no thinking part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing

import numpy as np

from nestling.core.clock import Clock, SystemClock
from nestling.core.errors import JailError, JobFailedError
from nestling.core.seeds import derive_seed, stream
from nestling.engine.checkpoint import Model, load_model, save_model
from nestling.engine.learn import PolicyTrainer, TrainRow
from nestling.inner.cpu_time import CpuMeter
from nestling.inner.row_sampler import RowSampler
from nestling.inner.timed_env import Deadline, TimedEnv
from nestling.inner.train_settings import TrainSettings
from nestling.inner.trainer import StepLog, TrainRequest, TrainResult
from nestling.jobs.env_client import open_env
from nestling.jobs.outcome import StepRecord
from nestling.jobs.rollout_env import RolloutEnv
from nestling.jobs.rollouts import EnvRollout, play_env

__all__ = ["EmbeddedTrainer"]

MAX_ROWS = 1024
"""Rows of a data set that are used; a job never starts more rollouts than this."""


class EmbeddedTrainer:
    """Trains in this process; the job's code runs in the jailed env worker only."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()

    def train(self, request: TrainRequest, log: StepLog) -> TrainResult:
        """See `Trainer.train`."""
        meter = CpuMeter()
        deadline = Deadline(self._clock, request.limits.train_wall_s, "train.timeout")
        model = load_model(request.base_folder)
        base = model.weights.clone()
        try:
            with closing(open_env(request.bundle, request.family)) as env:
                steps = _Course(request, model, TimedEnv(env, deadline), deadline).run(log)
        except JailError as error:
            reason = f"env.{error.reason.removeprefix('env.')}"
            raise JobFailedError(reason, error.detail) from error
        trained = model.weights if model.lora is None else model.lora.merged(model.weights)
        if not bool(trained.flat.isfinite().all()):
            raise JobFailedError("train.diverged", "weights are not finite; lower lr")
        save_model(request.out_folder, model)
        difference = trained.flat.double() - base.flat.double()
        return TrainResult(
            model_folder=request.out_folder,
            steps=steps,
            base_hash=base.content_hash(),
            final_hash=trained.content_hash(),
            delta_norm=float(difference.norm()),
            cpu_s=meter.elapsed_s(),
        )


class _Course:
    """One run over all training steps."""

    def __init__(
        self, request: TrainRequest, model: Model, env: RolloutEnv, deadline: Deadline
    ) -> None:
        self._seed = request.seed
        self._settings = TrainSettings(request.manifest.prime_rl)
        self._model = model
        self._env = env
        self._deadline = deadline
        self._learner: PolicyTrainer = self._settings.learner(model, seed=request.seed)
        num_rows = len(env.rows(MAX_ROWS))
        if num_rows == 0:
            raise JobFailedError("env.rows", "the data set has no rows")
        self._sampler = RowSampler(
            num_rows, self._settings.sampler, stream(request.seed, "rows")
        )

    def run(self, log: StepLog) -> list[StepRecord]:
        """All steps in order."""
        steps = []
        for step in range(self._settings.max_steps):
            self._deadline.check()
            record = self._step(step)
            steps.append(record)
            log(record)
        self._deadline.check()
        return steps

    def _step(self, step: int) -> StepRecord:
        meter, settings = CpuMeter(), self._settings
        rows = self._sampler.draw(settings.num_groups)
        groups = self._play(step, rows)
        rewards = np.array([[rollout.score.reward for rollout in group] for group in groups])
        for row, group_rewards in zip(rows, rewards.tolist(), strict=True):
            self._sampler.tell(row, group_rewards)
        advantages = settings.advantages(rewards, groups)
        batch = [
            _train_row(rollout, float(advantage))
            for group, group_advantages in zip(groups, advantages, strict=True)
            if np.any(group_advantages != 0.0)
            for rollout, advantage in zip(group, group_advantages, strict=True)
        ]
        rate = settings.learning_rate(step)
        update = _update(self._learner, batch, settings.temperature, rate) if batch else None
        return StepRecord(
            step=step,
            reward_mean=float(rewards.mean()),
            reward_std=float(rewards.std()),
            loss=update.loss if update else None,
            grad_norm=update.grad_norm if update else None,
            kl=update.kl if update else None,
            learning_rate=rate,
            trained_groups=int(np.any(advantages != 0.0, axis=1).sum()),
            rollout_tokens=sum(sum(r.rollout.sampled) for group in groups for r in group),
            cpu_s=meter.elapsed_s(),
        )

    def _play(self, step: int, rows: Sequence[int]) -> list[list[EnvRollout]]:
        """One group of rollouts per row."""
        size = self._settings.group_size
        indices = [row for row in rows for _ in range(size)]
        seeds = [derive_seed(self._seed, "rollout", step, i) for i in range(len(indices))]
        played = play_env(self._model, self._env, indices, seeds, self._settings.sampling)
        errors = [rollout.score.error for rollout in played if rollout.score.error is not None]
        if 2 * len(errors) > len(played):
            raise JobFailedError(
                "env.scoring", f"{len(errors)} of {len(played)} rollouts: {errors[0]}"
            )
        return [played[start : start + size] for start in range(0, len(played), size)]
