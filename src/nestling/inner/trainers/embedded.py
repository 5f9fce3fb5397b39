"""GRPO on our own engine: play, score by the job's rubric, compare within groups, update.

Every `[prime_rl]` key keeps its meaning (`jobs.bounds`, `inner.train_settings`). Rollouts always
come from the weights that are updated with them, so the staleness that `max_off_policy_steps`
limits is zero here, and `enable_thinking` has nothing to switch: our chat markup has no thinking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from nestling.core.clock import Clock, SystemClock
from nestling.core.errors import JailError, JobFailedError
from nestling.core.seeds import derive_seed, stream
from nestling.engine.checkpoint import Model, load_model, save_model
from nestling.engine.learn import LossStats, PolicyTrainer, StepStats, TrainRow
from nestling.inner.cpu_time import CpuMeter
from nestling.inner.guarded_env import Deadline, GuardedEnv
from nestling.inner.job_env import JobEnvOpener
from nestling.inner.row_sampler import RowSampler
from nestling.inner.train_settings import Grouping, learner_for, rate_at, sampling_for
from nestling.inner.trainer import StepLog, TrainRequest, TrainResult
from nestling.inner.warm_up import warm_up
from nestling.jobs.env_client import EnvStarter
from nestling.jobs.jail import Jail, JailLimits
from nestling.jobs.leaks import LeakIndex
from nestling.jobs.outcome import SampleRollout, StepRecord
from nestling.jobs.rollout_env import RolloutEnv
from nestling.jobs.rollouts import EnvRollout, play_env

__all__ = ["MAX_ROWS", "EmbeddedTrainer"]

MAX_ROWS = 1024
"""Rows that difficulty_pool chooses from; in order, a job reads as many as it has groups."""

_NUM_SAMPLES = 2
"""Rollouts kept as text of the first and of the last step."""
_MAX_SAMPLE_CHARS = 3_000


class EmbeddedTrainer:
    """Trains in this process; the job's code runs in a jailed child only."""

    def __init__(
        self,
        *,
        jail: Jail,
        starter: EnvStarter | None = None,
        env_limits: JailLimits | None = None,
        leaks: Callable[[str], LeakIndex | None] | None = None,
        spot_seed: int | None = None,
        device: str = "cpu",
        clock: Clock | None = None,
    ) -> None:
        """See `JobEnvOpener` for `leaks` and `spot_seed`; without them nothing is searched or compared."""
        self._device = device
        self._clock = clock or SystemClock()
        self._open_env = JobEnvOpener(
            jail=jail,
            starter=starter,
            limits=env_limits or JailLimits(),
            leaks=leaks,
            spot_seed=spot_seed,
            clock=self._clock,
        )

    def train(self, request: TrainRequest, log: StepLog) -> TrainResult:
        """See `Trainer.train`."""
        meter = CpuMeter()
        deadline = Deadline(self._clock, request.limits.wall_s, "train.timeout")
        model = load_model(request.base_folder, self._device)
        base = model.weights.clone()
        try:
            with closing(self._open_env(request)) as env:
                guarded = GuardedEnv(
                    env, deadline, model.tokenizer, request.manifest.prime_rl.seq_len
                )
                course = _Course(request, model, guarded, deadline)
                warmed = warm_up(
                    request, model.tokenizer, guarded, course.supervise, deadline.check
                )
                steps = course.run(log)
        except JailError as error:
            raise JobFailedError(env_reason(error), error.detail) from error
        trained = model.weights if model.lora is None else model.lora.merged(model.weights)
        if not bool(trained.flat.isfinite().all()):
            raise JobFailedError("train.diverged", _DIVERGED)
        save_model(request.out_folder, model)
        base_hash, moved = base.content_hash(), base.distance(trained)
        return TrainResult(
            model_folder=request.out_folder,
            steps=steps,
            base_hash=base_hash,
            final_hash=trained.content_hash(),
            delta_norm=moved,
            warm_up=warmed,
            cpu_s=meter.elapsed_s(),
        )


_DIVERGED = "the weights or gradients are no longer finite; use a lower lr or max_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """What one optimiser step reports."""

    loss: float
    grad_norm: float
    kl: float


class _Course:
    """One run over all training steps."""

    def __init__(
        self, request: TrainRequest, model: Model, env: RolloutEnv, deadline: Deadline
    ) -> None:
        self._table = request.manifest.prime_rl
        self._seed = request.seed
        self._model = model
        self._env = env
        self._deadline = deadline
        self._num_groups = self._table.batch_size // self._table.group_size
        wanted = self._table.max_steps * self._num_groups
        num_rows = len(env.rows(MAX_ROWS if self._table.sampler == "difficulty_pool" else wanted))
        if num_rows == 0:
            raise JobFailedError("env.rows", "the data set has no rows; expected at least one")
        self._sampler = RowSampler(num_rows, self._table.sampler, stream(self._seed, "rows"))
        self._grouping = Grouping(self._table)
        self._learner = learner_for(self._table, model, seed=derive_seed(self._seed, "learner"))

    def run(self, log: StepLog) -> list[StepRecord]:
        """All steps in order."""
        steps = []
        for step in range(self._table.max_steps):
            steps.append(self._step(step))
            self._deadline.check()
            log(steps[-1])
        return steps

    def supervise(self, rows: Sequence[TrainRow], rate: float) -> tuple[LossStats, StepStats]:
        """One step on rows with cross-entropy weights."""
        return self._learner.forward_backward(rows), self._learner.optim_step(rate)

    def _step(self, step: int) -> StepRecord:
        meter, table = CpuMeter(), self._table
        rows = self._sampler.draw(self._num_groups)
        groups = self._play(step, rows)
        rewards = np.array([[played.score.reward for played in group] for group in groups])
        for row, group_rewards in zip(rows, rewards.tolist(), strict=True):
            self._sampler.tell(row, group_rewards)
        rollouts = [[played.rollout for played in group] for group in groups]
        advantages = self._grouping.advantages(rewards, rollouts)
        batch = self._grouping.train_rows(rollouts, advantages)
        rate = rate_at(table, step)
        update = _update(self._learner, batch, table.temperature, rate) if batch else None
        return StepRecord(
            step=step,
            reward_mean=float(rewards.mean()),
            reward_std=float(rewards.std()),
            loss=update.loss if update else None,
            grad_norm=update.grad_norm if update else None,
            kl=update.kl if update else None,
            learning_rate=rate,
            trained_groups=int(np.any(advantages != 0.0, axis=1).sum()),
            rollout_tokens=sum(sum(rollout.sampled) for group in rollouts for rollout in group),
            cpu_s=meter.elapsed_s(),
            samples=self._samples(step, groups),
        )

    def _samples(
        self, step: int, groups: Sequence[Sequence[EnvRollout]]
    ) -> tuple[SampleRollout, ...]:
        """The first rollout of the first groups, so that each is of another row."""
        if step not in (0, self._table.max_steps - 1):
            return ()
        decode = self._model.tokenizer.decode
        return tuple(
            SampleRollout(
                text=decode(group[0].rollout.ids)[:_MAX_SAMPLE_CHARS],
                reward=group[0].score.reward,
            )
            for group in groups[:_NUM_SAMPLES]
        )

    def _play(self, step: int, rows: Sequence[int]) -> list[list[EnvRollout]]:
        """One group of rollouts per row, from the current weights."""
        size = self._table.group_size
        indices = [row for row in rows for _ in range(size)]
        seeds = [derive_seed(self._seed, "rollout", step, index) for index in range(len(indices))]
        played = play_env(self._model, self._env, indices, seeds, sampling_for(self._table))
        errors = [one.score.error for one in played if one.score.error is not None]
        if 2 * len(errors) > len(played):
            raise JobFailedError(
                "env.scoring",
                f"the rubric failed on {len(errors)} of {len(played)} rollouts of one step, for "
                f"example: {errors[0]}",
            )
        return [played[start : start + size] for start in range(0, len(played), size)]


def env_reason(error: JailError) -> str:
    """The reason code of a job whose environment failed."""
    return error.reason if error.reason.startswith(("env.", "jail.")) else f"env.{error.reason}"


def _update(
    learner: PolicyTrainer, batch: Sequence[TrainRow], temperature: float, rate: float
) -> _Update:
    loss = learner.forward_backward(batch, temperature)
    step = learner.optim_step(rate)
    if not step.updated or not math.isfinite(loss.loss):
        raise JobFailedError("train.diverged", _DIVERGED)
    sampled_logp = [
        logp
        for row in batch
        if row.advantage
        for logp, sampled in zip(row.logprobs, row.sampled, strict=True)
        if sampled
    ]
    sampler_mean = sum(sampled_logp) / max(len(sampled_logp), 1)
    return _Update(
        loss=loss.loss,
        grad_norm=step.grad_norm,
        kl=sampler_mean - loss.mean_logp if sampled_logp else 0.0,
    )
