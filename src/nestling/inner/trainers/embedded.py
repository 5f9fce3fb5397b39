"""GRPO on our own engine, the model in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np
import numpy.typing as npt

from nestling.core.clock import Clock, SystemClock
from nestling.core.errors import JailError, JobFailedError
from nestling.core.heap import trim_heap
from nestling.core.seeds import derive_seed
from nestling.engine.checkpoint import Model, load_model, save_model
from nestling.engine.learn import LossStats, StepStats, TrainRow
from nestling.engine.sampler import Rollout
from nestling.engine.tokenizer import Tokenizer
from nestling.inner.course import DIVERGED, Course, env_reason
from nestling.inner.cpu_time import CpuMeter
from nestling.inner.disk import writing
from nestling.inner.guarded_env import Deadline, GuardedEnv
from nestling.inner.job_env import JobEnvOpener
from nestling.inner.train_settings import Grouping, learner_for, sampling_for
from nestling.inner.trainer import StepLog, TrainRequest, TrainResult
from nestling.inner.warm_up import warm_up
from nestling.jobs.env_client import EnvStarter
from nestling.jobs.jail import Jail, JailLimits
from nestling.jobs.leaks import LeakIndex
from nestling.jobs.rollout_env import RolloutEnv
from nestling.jobs.rollouts import EnvRollout, play_env

__all__ = ["EmbeddedTrainer"]


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
        try:
            return self._train(request, log)
        finally:
            trim_heap()  # the scorer works next, and other workers are at their peak

    def _train(self, request: TrainRequest, log: StepLog) -> TrainResult:
        meter = CpuMeter()
        deadline = Deadline(self._clock, request.limits.wall_s, "train.timeout")
        model = load_model(request.base_folder, self._device)
        base = model.weights.clone()
        try:
            with closing(self._open_env(request, model.tokenizer)) as env:
                guarded = GuardedEnv(
                    env, deadline, model.tokenizer, request.manifest.prime_rl.seq_len
                )
                learning = _Learning(request, model)
                warmed = warm_up(
                    request, model.tokenizer, guarded, learning.supervise, deadline.check
                )
                steps = Course(request, learning, guarded, deadline).run(log)
        except JailError as error:
            raise JobFailedError(env_reason(error), error.detail) from error
        trained = model.weights if model.lora is None else model.lora.merged(model.weights)
        if not bool(trained.flat.isfinite().all()):
            raise JobFailedError("train.diverged", DIVERGED)
        merged = Model(config=model.config, weights=trained, tokenizer=model.tokenizer)
        with writing("train.disk", request.out_folder):
            save_model(request.out_folder, merged)
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


class _Learning:
    """A model and its trainer in this process; satisfies `inner.course.Learning`."""

    def __init__(self, request: TrainRequest, model: Model) -> None:
        self._table = request.manifest.prime_rl
        self._model = model
        self._learner = learner_for(self._table, model, seed=derive_seed(request.seed, "learner"))

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    def play(self, env: RolloutEnv, rows: Sequence[int], seeds: Sequence[int]) -> list[EnvRollout]:
        return play_env(self._model, env, rows, seeds, sampling_for(self._table))

    def update(
        self,
        grouping: Grouping,
        rollouts_PG: Sequence[Sequence[Rollout]],
        advantages_PG: npt.NDArray[np.float64],
        rate: float,
    ) -> tuple[LossStats, StepStats] | None:
        batch = grouping.train_rows(rollouts_PG, advantages_PG)
        if not batch:
            return None
        loss = self._learner.forward_backward(batch, self._table.temperature)
        return loss, self._learner.optim_step(rate)

    def supervise(self, rows: Sequence[TrainRow], rate: float) -> tuple[LossStats, StepStats]:
        """One step on rows with cross-entropy weights."""
        return self._learner.forward_backward(rows), self._learner.optim_step(rate)

    def busy_s(self) -> float:
        return 0.0
