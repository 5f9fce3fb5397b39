"""A batch of whole template jobs through stacks: env workers, training, both evals, as a run has them."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, Final

from nestling.bench.gpu_shapes import Sizes
from nestling.bench.progress import tell
from nestling.bench.room import open_worker_room, worker_room
from nestling.config import RunConfig
from nestling.families.registry import TRAINING
from nestling.inner.run import run_job
from nestling.jobs.bounds import SMALL
from nestling.jobs.bundle import Bundle
from nestling.jobs.manifest import JobManifest, render_manifest
from nestling.jobs.outcome import Outcome, StepRecord
from nestling.jobs.template import template_job
from nestling.wiring.rooms import running_stacks

__all__ = ["batch", "jobs_of"]

_BOUNDS: Final = replace(SMALL, max_rollouts=2048)
"""Ten steps of 128 rollouts are more than a small job of a run may take."""

_start: Barrier | None = None


def batch(config: RunConfig, sizes: Sizes, *, jobs: int) -> list[dict[str, Any]]:
    """Wall seconds of `jobs` jobs: a first batch, whose baselines are still to be computed, and the median of later ones.

    Worker processes, scorers and stacks are warm before the clock starts; environments are started per job, as ever.
    """
    workers = min(sizes.workers, jobs)
    context = multiprocessing.get_context("spawn")
    batches: list[tuple[float, list[Outcome]]] = []
    with (
        TemporaryDirectory(prefix="nestling-bench-") as scratch,
        running_stacks(config, Path(scratch) / "logs") as stacks,
    ):
        barrier = context.Barrier(workers)
        settings = (config, scratch, stacks, barrier)
        with ProcessPoolExecutor(workers, context, _open, settings) as pool:
            list(pool.map(_warm, range(workers)))
            for number in range(sizes.batches + 1):
                bundles = jobs_of(jobs, sizes)
                started = time.perf_counter()
                outcomes = list(pool.map(_run, bundles, range(jobs)))
                batches.append((time.perf_counter() - started, outcomes))
                tell(f"batch {number}: {batches[-1][0]:.1f} s")
    room = {
        "devices": len(config.inner.stack.devices),
        "processes": len(stacks),
        "workers": workers,
    }
    return [
        room | _row("baselines to compute", batches[:1]),
        room | _row("baselines known", batches[1:]),
    ]


def jobs_of(count: int, sizes: Sizes) -> list[Bundle]:
    """The template jobs of the training families in turn."""
    found = []
    for i in range(count):
        template = template_job(TRAINING[i % len(TRAINING)])
        table = template.manifest().prime_rl
        manifest = JobManifest.build(
            "micro",
            lr=table.lr,
            max_steps=sizes.job_steps,
            batch_size=sizes.rollouts,
            group_size=sizes.group_size,
            temperature=table.temperature,
            bounds=_BOUNDS,
        )
        files = dict(template.files) | {"job.toml": render_manifest(manifest).encode()}
        found.append(Bundle.from_files(files))
    return found


def _open(config: RunConfig, scratch: str, stacks: tuple[str, ...], start: Barrier) -> None:
    """Called once in each worker process."""
    global _start
    _start = start
    open_worker_room(config, scratch, stacks)
    worker_room().warm()


def _warm(number: int) -> str:
    """Wait until this worker's scorer is ready; every worker takes one of these calls."""
    assert _start is not None
    del number
    try:
        fingerprint = worker_room().context.scorer.fingerprint()
    except BaseException:
        _start.abort()  # the others would wait for this one for ever
        raise
    _start.wait()
    return fingerprint


def _run(bundle: Bundle, number: int) -> Outcome:
    family = TRAINING[number % len(TRAINING)]
    context = replace(worker_room().context, bounds=_BOUNDS, seed=number, keep_models=False)
    return run_job(bundle, family, context, _ignore)


def _ignore(step: StepRecord) -> None:
    """Steps are in the outcome as well."""


def _row(name: str, batches: Sequence[tuple[float, Sequence[Outcome]]]) -> dict[str, Any]:
    outcomes = [one for _, each in batches for one in each]
    ended = [one for one in outcomes if one.status == "succeeded"]
    seconds = median(each for each, _ in batches)
    return {
        "batch": name,
        "jobs": len(outcomes) // len(batches),
        "succeeded": len(ended) / len(batches),
        "reasons": sorted({one.reason for one in outcomes if one.reason}),
        "wall_s": seconds,
        "seconds": [each for each, _ in batches],
        "jobs_per_s": len(ended) / len(batches) / seconds,
        "mean_uplift": mean(one.uplift or 0.0 for one in ended) if ended else None,
        "longest_s": max(one.wall_s for one in outcomes),
        "mean_cpu_s": mean(one.cpu_s for one in outcomes),
    }
