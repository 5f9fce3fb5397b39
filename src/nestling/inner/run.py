"""One job from start to finish: frozen pre-score, training, post-score, outcome.

Whatever the job does wrong becomes an outcome with a reason code; our own bugs propagate.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from nestling.core.clock import Clock, SystemClock
from nestling.core.errors import JobFailedError, JobRejectedError
from nestling.core.seeds import derive_seed
from nestling.families.splits import HiddenSplit
from nestling.inner.baselines import Baseline, Baselines
from nestling.inner.cpu_time import CpuMeter
from nestling.inner.disk import writing
from nestling.inner.scorer import Score, Scorer
from nestling.inner.statistics import Interval, paired_difference
from nestling.inner.trainer import StepLog, Trainer, TrainLimits, TrainRequest, TrainResult
from nestling.jobs.bounds import SMALL, Bounds
from nestling.jobs.bundle import Bundle
from nestling.jobs.manifest import JobManifest
from nestling.jobs.outcome import Outcome, OutcomeStatus, StepRecord

__all__ = ["InnerContext", "run_job"]

_TIMEOUTS: Final = frozenset(
    {"train.timeout", "train.hung", "env.deadline", "scorer.timeout", "scorer.start_timeout"}
)
_DELTA_NORM_TOLERANCE: Final = 1e-3
"""Relative; the trainer sums in float32, the scorer in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerContext:
    """The machine room of one worker; the same for every job it runs."""

    trainer: Trainer
    scorer: Scorer
    baselines: Baselines
    bases: Mapping[str, Path]
    """Name to folder of the pinned base models."""
    bounds: Bounds = SMALL
    """Which settings a job may use; the probe's."""
    work_folder: Path
    """Trained models are written below it, one new folder per run of a job."""
    keep_models: bool = True
    """False: a trained model is removed once it is scored."""
    n: int = 200
    """Hidden items per scoring."""
    split: HiddenSplit = "b"
    seed: int = 0
    """Root of the training seeds; the job's hash is mixed in, so a job repeats exactly."""
    usd_per_hour: float = 0.0
    """Price of one processor hour."""
    limits: TrainLimits = field(default_factory=TrainLimits)
    clock: Clock = field(default_factory=SystemClock)


def run_job(bundle: Bundle, family: str, context: InnerContext, log: StepLog) -> Outcome:
    """Train and score one job that passed the probe.

    cpu_s counts trainer, env worker and post-score. A baseline computed on the way is shared by
    all jobs of the family and counts for none of them.
    """
    run = _JobRun(bundle, family, context, log)
    try:
        run.check()
        run.pre_score()
        run.train()
        run.post_score()
    except JobFailedError as error:
        return run.failed(error.reason, error.detail)
    except JobRejectedError as error:
        return run.failed("job.rejected", str(error))
    finally:
        run.clean_up()
    return run.succeeded()


class _JobRun:
    """What is known so far about one job; every stage adds to it."""

    def __init__(self, bundle: Bundle, family: str, context: InnerContext, log: StepLog) -> None:
        self._bundle = bundle
        self._family = family
        self._context = context
        self._log = log
        self._steps: list[StepRecord] = []
        self._manifest: JobManifest | None = None
        self._pre: Baseline | None = None
        self._best: Baseline | None = None
        self._trained: TrainResult | None = None
        self._post: Score | None = None
        self._started_s: float | None = None
        self._train_cpu_s = 0.0
        self._folder: Path | None = None

    def check(self) -> None:
        """The bundle is the one that was probed, and names a base we have."""
        actual = Bundle.from_files(self._bundle.files).job_hash
        if actual != self._bundle.job_hash:
            raise JobFailedError(
                "job.hash_mismatch",
                f"the files hash to {actual[:12]}, the job says {self._bundle.job_hash[:12]}",
            )
        self._manifest = self._bundle.manifest(self._context.bounds)
        if self._manifest.base_model not in self._context.bases:
            raise JobFailedError(
                "job.unknown_base",
                f"base_model {self._manifest.base_model!r}; this worker has "
                f"{', '.join(sorted(self._context.bases))}",
            )

    def pre_score(self) -> None:
        """Frozen baselines of all bases on the items that the trained model will meet."""
        assert self._manifest is not None
        context = self._context
        context.scorer.start()
        self._best = context.baselines.best_base(self._family, context.split, context.n)
        self._pre = context.baselines.get(
            self._manifest.base_model, self._family, context.split, context.n
        )

    def train(self) -> None:
        """Hand the job to the trainer."""
        assert self._manifest is not None
        context, bundle = self._context, self._bundle
        self._started_s = context.clock.monotonic()
        request = TrainRequest(
            bundle=bundle,
            manifest=self._manifest,
            family=self._family,
            base_folder=context.bases[self._manifest.base_model],
            out_folder=self._new_folder(),
            seed=derive_seed(context.seed, "train", bundle.job_hash),
            limits=context.limits,
        )
        meter = CpuMeter()
        try:
            self._trained = context.trainer.train(request, self._note_step)
            self._train_cpu_s = self._trained.cpu_s
        except JobFailedError:
            self._train_cpu_s = meter.elapsed_s()
            raise

    def post_score(self) -> None:
        """Same items, same sampling seeds, other weights; and they are the trainer's weights."""
        assert self._trained is not None
        assert self._manifest is not None
        assert self._pre is not None
        context, trained = self._context, self._trained
        score = context.scorer.score(
            trained.model_folder,
            base=self._manifest.base_model,
            family=self._family,
            split=context.split,
            n=context.n,
        )
        expected = trained.delta_norm
        if score.weights_hash != trained.final_hash or (
            abs(score.delta_norm - expected) > _DELTA_NORM_TOLERANCE * max(expected, 1e-6)
        ):
            raise JobFailedError(
                "scorer.lineage", "the scored weights are not those that the trainer reported"
            )
        self._post = score

    def succeeded(self) -> Outcome:
        """The whole record."""
        return self._outcome("succeeded")

    def failed(self, reason: str, detail: str) -> Outcome:
        """The record of a job that died; what was measured before is kept."""
        return self._outcome("timed_out" if reason in _TIMEOUTS else "failed", reason, detail)

    def clean_up(self) -> None:
        """Remove what nobody will read: a model that was not scored, or is not to be kept."""
        if self._folder is not None and (self._post is None or not self._context.keep_models):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _new_folder(self) -> Path:
        work = self._context.work_folder
        prefix = f"{self._bundle.job_hash[:16]}-"
        with writing("train.disk", work):
            work.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix=prefix, dir=work))
        return self._folder

    def _note_step(self, step: StepRecord) -> None:
        self._steps.append(step)
        self._log(step)

    def _outcome(self, status: OutcomeStatus, reason: str = "", detail: str = "") -> Outcome:
        trained, clock = self._trained, self._context.clock
        uplift = self._uplift()
        cpu_s = self._train_cpu_s + (self._post.cpu_s if self._post else 0.0)
        return Outcome(
            job_hash=self._bundle.job_hash,
            family=self._family,
            base_model=self._manifest.base_model if self._manifest else "",
            status=status,
            reason=reason,
            detail=detail,
            pre=self._pre.mean if self._pre else None,
            best_pre=self._best.mean if self._best else None,
            post=self._post.mean if self._post else None,
            uplift=uplift.mean if uplift else None,
            uplift_ci=(uplift.lo, uplift.hi) if uplift else None,
            n=uplift.n if uplift else 0,
            train_steps=len(self._steps),
            steps=tuple(self._steps),
            warm_up=trained.warm_up if trained else None,
            base_hash=trained.base_hash if trained else None,
            final_hash=trained.final_hash if trained else None,
            delta_norm=trained.delta_norm if trained else None,
            model_ref=self._model_ref(),
            cpu_s=cpu_s,
            wall_s=clock.monotonic() - self._started_s if self._started_s is not None else 0.0,
            usd=cpu_s / 3600 * self._context.usd_per_hour,
        )

    def _uplift(self) -> Interval | None:
        if self._post is None or self._best is None:
            return None
        return paired_difference(self._post.correct, self._best.correct)

    def _model_ref(self) -> str | None:
        if self._trained is None or self._post is None or not self._context.keep_models:
            return None
        return self._trained.model_folder.relative_to(self._context.work_folder).as_posix()
