"""Open a job's environment for training: jailed, its rows searched, its behaviour held to the probe's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nestling.core.clock import Clock
from nestling.core.seeds import derive_seed
from nestling.engine.tokenizer import Tokenizer
from nestling.families.public_package import public_files
from nestling.families.registry import get
from nestling.inner.trainer import TrainRequest
from nestling.jobs.env_client import EnvStarter, JailedEnv, RowCheck, open_env
from nestling.jobs.jail import Jail, JailLimits
from nestling.jobs.leaks import LeakIndex, leak_problems
from nestling.jobs.probe_env import PROBE_LIMITS
from nestling.jobs.rollout_env import RolloutEnv, Row
from nestling.jobs.spot_checks import SpotChecks

__all__ = ["JobEnvOpener"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnvOpener:
    """How a trainer opens the environment of any job."""

    jail: Jail
    starter: EnvStarter | None = None
    """A zygote for warm starts."""
    limits: JailLimits
    leaks: Callable[[str], LeakIndex | None] | None = None
    """A family's index: rows served in training alone are searched as well; None searches none."""
    spot_seed: int | None = None
    """Chooses what is compared with the probe's behaviour, out of the job's reach; None compares nothing."""
    clock: Clock

    def __call__(self, request: TrainRequest, tokenizer: Tokenizer | None = None) -> RolloutEnv:
        """The loaded environment; the caller closes it. `tokenizer` as for `SpotChecks`.

        Raises:
            JailError: it does not start, or its package does not load.
        """
        env = self._open(request, self.limits, self._row_check(request.family))
        if self.spot_seed is None:
            return env
        try:
            # A probe's limits in all that a job can see; its whole life is that of the training.
            limits = replace(PROBE_LIMITS, life_s=self.limits.life_s, call_s=self.limits.call_s)
            reference = self._open(request, limits, None)
        except BaseException:
            env.close()
            raise
        seed = derive_seed(self.spot_seed, request.bundle.job_hash, request.seed)
        return SpotChecks(env, reference, get(request.family), seed, tokenizer)

    def _open(
        self, request: TrainRequest, limits: JailLimits, check_rows: RowCheck | None
    ) -> JailedEnv:
        return open_env(
            request.bundle.files,
            public_files(request.family),
            limits,
            jail=self.jail,
            starter=self.starter,
            env_args=request.manifest.env,
            check_rows=check_rows,
            clock=self.clock,
        )

    def _row_check(self, family: str) -> RowCheck | None:
        index = None if self.leaks is None else self.leaks(family)
        if index is None:
            return None

        def check(rows: Sequence[Row]) -> str | None:
            problems = leak_problems(index, rows, {})
            return problems[0].wrong if problems else None

        return check
