"""GRPO in a stack: this process asks and answers, the model is one of many in a stack process.

The job's environment is a jailed child of this process, as with the embedded trainer, so agent code is as far from
the stack as from any other process of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np
import numpy.typing as npt

from nestling.core.clock import Clock, SystemClock
from nestling.core.errors import JailError, JobFailedError
from nestling.core.seeds import derive_seed
from nestling.engine.learn import LossStats, StepStats
from nestling.engine.sampler import Rollout
from nestling.engine.tokenizer import Tokenizer
from nestling.inner.course import DIVERGED, Course, env_reason
from nestling.inner.cpu_time import CpuMeter
from nestling.inner.guarded_env import Deadline, GuardedEnv
from nestling.inner.job_env import JobEnvOpener
from nestling.inner.stack_client import StackJob, Stacks
from nestling.inner.stack_settings import LearnSettings
from nestling.inner.train_settings import Grouping, lora_for, loss_for, optim_for, sampling_for
from nestling.inner.trainer import StepLog, TrainRequest, TrainResult
from nestling.inner.warm_up import warm_up
from nestling.jobs.env_client import EnvStarter
from nestling.jobs.jail import Jail, JailLimits
from nestling.jobs.leaks import LeakIndex
from nestling.jobs.rollout_env import RolloutEnv
from nestling.jobs.rollouts import EnvResponder, EnvRollout

__all__ = ["StackedTrainer"]


class StackedTrainer:
    """Trains through a stack process; many of these, in many processes, share one."""

    def __init__(
        self,
        *,
        stacks: Stacks,
        jail: Jail,
        starter: EnvStarter | None = None,
        env_limits: JailLimits | None = None,
        leaks: Callable[[str], LeakIndex | None] | None = None,
        spot_seed: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        """As for the embedded trainer; `stacks` are the processes to choose from."""
        self._stacks = stacks
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
        """See `Trainer.train`; `cpu_s` counts this process tree and the job's share of the device.

        Raises:
            LearnerError: the stack process ended; the job may be tried again.
        """
        meter = CpuMeter()
        deadline = Deadline(self._clock, request.limits.wall_s, "train.timeout")
        tokenizer = Tokenizer.load(request.base_folder)
        table = request.manifest.prime_rl
        settings = LearnSettings(
            loss=loss_for(table),
            optim=optim_for(table),
            lora=lora_for(table),
            seed=derive_seed(request.seed, "learner"),
        )
        try:
            with (
                closing(self._open_env(request, tokenizer)) as env,
                closing(
                    self._stacks.join(request.manifest.base_model, settings, deadline.check)
                ) as job,
            ):
                guarded = GuardedEnv(env, deadline, tokenizer, table.seq_len)
                learning = _Learning(request, job, tokenizer)
                warmed = warm_up(request, tokenizer, guarded, job.supervise, deadline.check)
                steps = Course(request, learning, guarded, deadline).run(log)
                saved = job.save(str(request.out_folder.absolute()))
        except JailError as error:
            raise JobFailedError(env_reason(error), error.detail) from error
        if not saved.is_finite:
            raise JobFailedError("train.diverged", DIVERGED)
        return TrainResult(
            model_folder=request.out_folder,
            steps=steps,
            base_hash=saved.base_hash,
            final_hash=saved.final_hash,
            delta_norm=saved.delta_norm,
            warm_up=warmed,
            cpu_s=meter.elapsed_s() + saved.busy_s,
        )


class _Learning:
    """A job in a stack; satisfies `inner.course.Learning`."""

    def __init__(self, request: TrainRequest, job: StackJob, tokenizer: Tokenizer) -> None:
        self._table = request.manifest.prime_rl
        self._job = job
        self.tokenizer = tokenizer

    def play(self, env: RolloutEnv, rows: Sequence[int], seeds: Sequence[int]) -> list[EnvRollout]:
        responder = EnvResponder(env, self.tokenizer, rows)
        rollouts = self._job.play(
            self.tokenizer,
            responder.prompts,
            seeds,
            sampling_for(self._table),
            responder.respond,
        )
        scores = responder.score(rollouts)
        return [
            EnvRollout(rollout=rollout, score=score)
            for rollout, score in zip(rollouts, scores, strict=True)
        ]

    def update(
        self,
        grouping: Grouping,
        rollouts_PG: Sequence[Sequence[Rollout]],
        advantages_PG: npt.NDArray[np.float64],
        rate: float,
    ) -> tuple[LossStats, StepStats] | None:
        del grouping, rollouts_PG  # the stack has kept what was played
        learn_observations = self._table.algo == "echo"
        if not learn_observations and not advantages_PG.any():
            return None
        return self._job.train(
            advantages_PG.reshape(-1).tolist(),
            learn_observations=learn_observations,
            temperature=self._table.temperature,
            lr=rate,
        )

    def busy_s(self) -> float:
        return self._job.busy_s
