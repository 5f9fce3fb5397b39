"""The steps of one training run, wherever the model is: play, score by the job's rubric, compare within groups, update.

Every `[prime_rl]` key keeps its meaning (`jobs.bounds`, `inner.train_settings`). Rollouts always
come from the weights that are updated with them, so the staleness that `max_off_policy_steps`
limits is zero here, and `enable_thinking` has nothing to switch: our chat markup has no thinking.

Axes: P prompt (group), G rollout of one group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nestling.core.errors import JailError, JobFailedError
from nestling.core.seeds import derive_seed, stream
from nestling.engine.learn import LossStats, StepStats
from nestling.engine.sampler import Rollout
from nestling.engine.tokenizer import Tokenizer
from nestling.inner.cpu_time import CpuMeter
from nestling.inner.guarded_env import Deadline
from nestling.inner.row_sampler import RowSampler
from nestling.inner.train_settings import Grouping, rate_at
from nestling.inner.trainer import StepLog, TrainRequest
from nestling.jobs.outcome import SampleRollout, StepRecord
from nestling.jobs.rollout_env import RolloutEnv
from nestling.jobs.rollouts import EnvRollout

__all__ = ["DIVERGED", "MAX_ROWS", "Course", "Learning", "env_reason"]

MAX_ROWS = 1024
"""Rows that difficulty_pool chooses from; in order, a job reads as many as it has groups."""
DIVERGED = "the weights or gradients are no longer finite; use a lower lr or max_norm"

_NUM_SAMPLES = 2
"""Rollouts kept as text of the first and of the last step."""
_MAX_SAMPLE_CHARS = 3_000


class Learning(Protocol):
    """The model's side of a run: it samples and is updated."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        ...

    def play(self, env: RolloutEnv, rows: Sequence[int], seeds: Sequence[int]) -> list[EnvRollout]:
        """One rollout per row, from the current weights."""
        ...

    def update(
        self,
        grouping: Grouping,
        rollouts_PG: Sequence[Sequence[Rollout]],
        advantages_PG: npt.NDArray[np.float64],
        rate: float,
    ) -> tuple[LossStats, StepStats] | None:
        """One optimiser step on what was played last; None when nothing carries a gradient."""
        ...

    def busy_s(self) -> float:
        """Processor or device seconds spent outside this process tree so far."""
        ...


class Course:
    """One run over all training steps."""

    def __init__(
        self, request: TrainRequest, learning: Learning, env: RolloutEnv, deadline: Deadline
    ) -> None:
        self._table = request.manifest.prime_rl
        self._seed = request.seed
        self._learning = learning
        self._env = env
        self._deadline = deadline
        self._num_groups = self._table.batch_size // self._table.group_size
        wanted = self._table.max_steps * self._num_groups
        num_rows = len(env.rows(MAX_ROWS if self._table.sampler == "difficulty_pool" else wanted))
        if num_rows == 0:
            raise JobFailedError("env.rows", "the data set has no rows; expected at least one")
        self._sampler = RowSampler(num_rows, self._table.sampler, stream(self._seed, "rows"))
        self._grouping = Grouping(self._table)

    def run(self, log: StepLog) -> list[StepRecord]:
        """All steps in order."""
        steps = []
        for step in range(self._table.max_steps):
            steps.append(self._step(step))
            self._deadline.check()
            log(steps[-1])
        return steps

    def _step(self, step: int) -> StepRecord:
        meter, before_s = CpuMeter(), self._learning.busy_s()
        rows = self._sampler.draw(self._num_groups)
        groups = self._play(step, rows)
        rewards = np.array([[played.score.reward for played in group] for group in groups])
        for row, group_rewards in zip(rows, rewards.tolist(), strict=True):
            self._sampler.tell(row, group_rewards)
        rollouts = [[played.rollout for played in group] for group in groups]
        advantages = self._grouping.advantages(rewards, rollouts)
        rate = rate_at(self._table, step)
        update = self._learning.update(self._grouping, rollouts, advantages, rate)
        if update is not None and not (update[1].updated and math.isfinite(update[0].loss)):
            raise JobFailedError("train.diverged", DIVERGED)
        return StepRecord(
            step=step,
            reward_mean=float(rewards.mean()),
            reward_std=float(rewards.std()),
            loss=update[0].loss if update else None,
            grad_norm=update[1].grad_norm if update else None,
            kl=_moved(rollouts, advantages, update[0].mean_logp) if update else None,
            learning_rate=rate,
            trained_groups=int(np.any(advantages != 0.0, axis=1).sum()),
            rollout_tokens=sum(sum(rollout.sampled) for group in rollouts for rollout in group),
            cpu_s=meter.elapsed_s() + self._learning.busy_s() - before_s,
            samples=self._samples(step, groups),
        )

    def _samples(
        self, step: int, groups: Sequence[Sequence[EnvRollout]]
    ) -> tuple[SampleRollout, ...]:
        """The first rollout of the first groups, so that each is of another row."""
        if step not in (0, self._table.max_steps - 1):
            return ()
        decode = self._learning.tokenizer.decode
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
        played = self._learning.play(self._env, indices, seeds)
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


def _moved(
    rollouts: Sequence[Sequence[Rollout]], advantages: npt.NDArray[np.float64], mean_logp: float
) -> float:
    """Mean log-probability of the sampler minus that of the learner, on the tokens trained on."""
    sampled_logp = [
        logp
        for group, group_advantages in zip(rollouts, advantages.tolist(), strict=True)
        for rollout, advantage in zip(group, group_advantages, strict=True)
        if advantage
        for logp, sampled in zip(rollout.logprobs, rollout.sampled, strict=True)
        if sampled
    ]
    return sum(sampled_logp) / len(sampled_logp) - mean_logp if sampled_logp else 0.0
