"""GRPO by prime-rl: the `rl` program, once per job, on GPUs of this machine.

prime-rl loads the job's own package into its processes, outside our jail and with the rights of this user: that is
how it works, and no setting changes it. What is jailed here is one look at the environment before any GPU is busy;
after that our secrets are out of sight, and everything that comes back is checked. The rest of the machine is open to
the job, so a job belongs on a machine of its own; see docs/prime-rl.md.
Seeds do not reach prime-rl, and its runs do not repeat.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from nestling.core.clock import Clock, SystemClock
from nestling.core.errors import JailError, JobFailedError
from nestling.engine.checkpoint import Model, load_model, save_model
from nestling.engine.lora import save_adapter
from nestling.inner.course import MAX_ROWS, env_reason
from nestling.inner.disk import writing
from nestling.inner.guarded_env import Deadline
from nestling.inner.kept_process import KeptProcess
from nestling.inner.prime_rl_config import PrimeRlConfig
from nestling.inner.trainer import StepLog, TrainRequest, TrainResult
from nestling.inner.trainers.prime_rl_faults import failure, known_cause, last_words
from nestling.inner.trainers.prime_rl_folder import RunFolder
from nestling.inner.trainers.prime_rl_metrics import MetricsReader
from nestling.inner.trainers.prime_rl_process import (
    find_program,
    program_environment,
    veiled,
    visible_gpus,
)
from nestling.inner.trainers.prime_rl_weights import ADAPTER_FOLDER, trained_weights
from nestling.jobs.outcome import StepRecord
from nestling.jobs.rollout_env import RolloutEnv

__all__ = ["PrimeRlTrainer"]


class PrimeRlTrainer:
    """Satisfies `Trainer`, but for determinism: see the module."""

    def __init__(
        self,
        config: PrimeRlConfig,
        *,
        open_env: Callable[[TrainRequest], RolloutEnv] | None = None,
        hidden: Sequence[Path] = (),
        clock: Clock | None = None,
    ) -> None:
        """`open_env` opens a job's environment in the jail, for the look before; None looks at nothing.

        `hidden` are files and folders that no job may read.
        """
        self._config = config
        self._open_env = open_env
        self._hidden = [path.absolute() for path in hidden]
        self._clock = clock or SystemClock()

    def train(self, request: TrainRequest, log: StepLog) -> TrainResult:
        """See `Trainer.train`; `cpu_s`, of the run and of each step, is wall time times GPUs, all of them its own.

        Raises:
            ConfigError: `rl` is not installed, or the worker has too few GPUs.
            JobFailedError: `train.timeout`, `train.hung` (no step for `step_s`), `train.out_of_memory`,
                `train.no_signal`, `train.config`, `train.install`, `train.inference_died`, `train.crashed`,
                `train.no_weights`, `train.weights`, `train.diverged`, `train.disk`, `env.*`.
        """
        started_s = self._clock.monotonic()
        deadline = Deadline(self._clock, request.limits.wall_s, "train.timeout")
        self._look_at(request)
        out = request.out_folder
        root = out.with_name(f"{out.name}.prime-rl")
        with writing("train.disk", root):
            folder = RunFolder.prepare(root, request, self._config)
        try:
            steps = self._run(request, folder, deadline, log)
            return self._collect(request, folder, steps, started_s)
        finally:
            if not self._config.keep_runs:
                folder.remove()

    def _look_at(self, request: TrainRequest) -> None:
        """Load the job in the jail and read its rows: what can be seen to be wrong costs no GPU second."""
        if self._open_env is None:
            return
        try:
            with closing(self._open_env(request)) as env:
                num_rows = len(env.rows(MAX_ROWS))
        except JailError as error:
            raise JobFailedError(env_reason(error), error.detail) from error
        if num_rows == 0:
            raise JobFailedError("env.rows", "the data set has no rows; expected at least one")

    def _run(
        self, request: TrainRequest, folder: RunFolder, deadline: Deadline, log: StepLog
    ) -> list[StepRecord]:
        config, max_steps = self._config, request.manifest.prime_rl.max_steps
        program = find_program(config.program)
        environment = program_environment(
            os.environ,
            program,
            folder.package,
            more=config.passed_on,
            gpus=visible_gpus(
                config.train_gpus + config.infer_gpus,
                shared=config.share_gpu,
                visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
            ),
        )
        reader = MetricsReader(folder.run, max_steps, self._clock, num_gpus=config.num_gpus)
        steps: list[StepRecord] = []
        stalled = self._step_limit()
        command = [str(program), "@", str(folder.toml)]
        if config.veil:
            command = veiled(command, self._hidden)
        with KeptProcess(command, environment, folder.root, folder.output) as process:
            while (code := process.ended(config.poll_s)) is None:
                if found := reader.read():
                    steps += _logged(found, log)
                    stalled = self._step_limit()
                try:
                    deadline.check()
                    stalled.check()
                except JobFailedError as late:
                    raise _explained(late, folder) from late
        steps += _logged(reader.read(), log)
        if code != 0:
            raise failure(folder.run, folder.output, code)
        return steps

    def _step_limit(self) -> Deadline:
        return Deadline(self._clock, self._config.step_s, "train.hung")

    def _collect(
        self, request: TrainRequest, folder: RunFolder, steps: list[StepRecord], started_s: float
    ) -> TrainResult:
        base = load_model(request.base_folder)
        out = request.out_folder
        weights, adapter = trained_weights(
            folder.run, request.base_folder, base, request.manifest.prime_rl
        )
        with writing("train.disk", out):
            save_model(out, Model(config=base.config, weights=weights, tokenizer=base.tokenizer))
            if adapter is not None:
                save_adapter(out / ADAPTER_FOLDER, adapter, base_model=request.manifest.base_model)
        return TrainResult(
            model_folder=out,
            steps=steps,
            base_hash=base.weights.content_hash(),
            final_hash=weights.content_hash(),
            delta_norm=base.weights.distance(weights),
            cpu_s=(self._clock.monotonic() - started_s) * self._config.num_gpus,
        )


def _logged(found: list[StepRecord], log: StepLog) -> list[StepRecord]:
    for step in found:
        log(step)
    return found


def _explained(late: JobFailedError, folder: RunFolder) -> JobFailedError:
    """A run that waits for something that died is told by what died."""
    cause = known_cause(folder.run, folder.output)
    if cause is not None:
        return cause
    words = last_words(folder.run, folder.output)
    return JobFailedError(late.reason, f"{late.detail}; {words}"[:1500] if words else late.detail)
