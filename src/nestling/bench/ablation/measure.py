"""Swap, train again, score again: a policy's jobs and their swapped versions on a fleet of their own.

Both sides of a pair meet the same hidden items with the same sampling seeds, and their training seeds
have the same root. The folder keeps what was trained: the same command continues, and a job that
several pairs need is trained once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from nestling.agent.reward import Terms, compute_terms
from nestling.bench.ablation.accepted import Accepted, AcceptedJob
from nestling.bench.ablation.parts import PARTS, Part, with_part
from nestling.bench.ablation.swaps import COLUMNS, Swap, figures_of, rows_of
from nestling.bench.record import Measured
from nestling.config import RunConfig, load_recipe, recipe_toml
from nestling.core.errors import ConfigError, FleetError, JobRejectedError, NestlingError, Problem
from nestling.core.rundir import RunDir, write_atomic
from nestling.fleet.runner import FleetRunner
from nestling.inner.models_config import bounds_of
from nestling.jobs.bounds import Bounds
from nestling.jobs.bundle import Bundle
from nestling.jobs.outcome import Outcome
from nestling.jobs.template import template_job
from nestling.store import GroupCommit
from nestling.store.run_store import RunStore
from nestling.wiring.fleets import open_fleet

__all__ = ["OnTrained", "ablate"]

Key = tuple[str, str]
"""Family and job hash."""
Result = Outcome | Problem
"""What became of a training, or why the probe refused the job."""
OnTrained = Callable[[str, Bundle, Result], None]
"""Family, job, result."""

_NO_FAULT_OF_THE_JOB = "lost"
_NO_ROOM = "budget.refused"


async def ablate(
    config: RunConfig,
    accepted: Accepted,
    folder: Path,
    *,
    told: OnTrained,
    parts: Sequence[Part] = PARTS,
    seeds: int = 1,
) -> Measured:
    """What each part of the jobs earns over the template's.

    Args:
        config: how jobs are trained, scored and paid; `inner.seed` is the first training seed.
        accepted: the jobs.
        folder: where trainings are kept.
        told: called after each training or refusal.
        parts: which ones.
        seeds: training seeds of every job.

    Raises:
        ConfigError: the folder belongs to other settings, or the jail is missing.
        FleetError, StoreError: may be continued by calling again.
    """
    bounds = bounds_of(config.models, config.inner.trainer)
    swapped = {
        (job.episode_id, part): _swapped(job, part, bounds)
        for job in accepted.jobs
        for part in parts
    }
    wanted = {(job.family, job.bundle.job_hash): job.bundle for job in accepted.jobs}
    for job in accepted.jobs:
        for part in parts:
            other = swapped[job.episode_id, part]
            if isinstance(other, Bundle):
                wanted.setdefault((job.family, other.job_hash), other)
    by_seed = await _train_all(config, wanted, folder, seeds, told)
    swaps = [
        _swap(job, part, swapped[job.episode_id, part], by_seed, config, bounds)
        for job in accepted.jobs
        for part in parts
    ]
    figures = figures_of(swaps, config.reward.weights)
    return Measured(
        settings={
            "whose": accepted.whose,
            "episodes": accepted.num_episodes,
            "accepted": accepted.num_accepted,
            "jobs": len(accepted.jobs),
            "not_kept": accepted.not_kept,
            "parts": list(parts),
            "seeds": list(range(config.inner.seed, config.inner.seed + seeds)),
            "items": config.inner.eval_items,
            "reward": config.reward.kind,
            "trainings": len(wanted) * seeds,
        },
        runs=tuple(one.model_dump(mode="json") for one in swaps),
        figures=figures,
        columns=COLUMNS,
        rows=tuple(rows_of(figures)),
    )


def _swapped(job: AcceptedJob, part: Part, bounds: Bounds) -> Bundle | Problem:
    try:
        return with_part(job.bundle, template_job(job.family), part, bounds)
    except JobRejectedError as error:
        return error.problems[0]


async def _train_all(
    config: RunConfig,
    wanted: Mapping[Key, Bundle],
    folder: Path,
    seeds: int,
    told: OnTrained,
) -> list[dict[Key, Result]]:
    run = _open_folder(config, folder)
    found = []
    with closing(RunStore(run.database)) as store, run.lock():
        writer = GroupCommit(store)
        try:
            for place in range(seeds):
                inner = config.inner.model_copy(update={"seed": config.inner.seed + place})
                seeded = config.model_copy(update={"inner": inner})
                async with open_fleet(seeded, run, writer) as fleet:
                    found.append(await _train(fleet, wanted, told))
        finally:
            await asyncio.to_thread(writer.close)
    return found


async def _train(
    fleet: FleetRunner, wanted: Mapping[Key, Bundle], told: OnTrained
) -> dict[Key, Result]:
    found: dict[Key, Result] = {}

    async def one(family: str, bundle: Bundle) -> None:
        report = await fleet.check(bundle, family)
        result = await fleet.run(bundle, family) if report.ok else report.problems[0]
        if isinstance(result, Problem) and result.code == _NO_ROOM:
            raise FleetError(f"{result.wrong}; raise the caps of [budget] and run this again")
        found[family, bundle.job_hash] = result
        told(family, bundle, result)

    try:
        async with asyncio.TaskGroup() as group:
            for (family, _), bundle in wanted.items():
                group.create_task(one(family, bundle))
    except* NestlingError as errors:
        raise errors.exceptions[0] from None
    return found


def _open_folder(config: RunConfig, folder: Path) -> RunDir:
    """Make the folder, or check that what it holds was trained the same way."""
    path = folder / "config.toml"
    if path.exists() and load_recipe(path) != config:
        raise ConfigError(
            f"{folder} holds trainings of other settings; expected those of {path}; choose another --folder"
        )
    run = RunDir.create(folder)
    write_atomic(path, recipe_toml(config).encode())
    return run


def _swap(
    job: AcceptedJob,
    part: Part,
    other: Bundle | Problem,
    by_seed: Sequence[Mapping[Key, Result]],
    config: RunConfig,
    bounds: Bounds,
) -> Swap:
    known = {
        "episode_id": job.episode_id,
        "task": job.task,
        "family": job.family,
        "part": part,
        "job_hash": job.bundle.job_hash,
    }
    if isinstance(other, Problem):
        return Swap(**known, swapped_hash=None, not_runnable=other.code, detail=other.line())
    own_results = [found[job.family, job.bundle.job_hash] for found in by_seed]
    results = [found[job.family, other.job_hash] for found in by_seed]
    for whose, of_job in (("own.", own_results), ("", results)):
        if failed := next((_failure(one) for one in of_job if _failure(one)), None):
            code, detail = failed
            return Swap(
                **known, swapped_hash=other.job_hash, not_runnable=f"{whose}{code}", detail=detail
            )
    paid = [
        tuple(_paid(job, one, bundle, config, bounds) for one in found if isinstance(one, Outcome))
        for found, bundle in ((own_results, job.bundle), (results, other))
    ]
    return Swap(
        **known,
        swapped_hash=other.job_hash,
        own=paid[0],
        swapped=paid[1],
        died=sum(isinstance(one, Outcome) and one.status != "succeeded" for one in results),
    )


def _failure(result: Result) -> tuple[str, str] | None:
    """Why a training says nothing about the job."""
    if isinstance(result, Problem):
        return result.code, result.line()
    if result.status == _NO_FAULT_OF_THE_JOB:
        return result.reason, result.detail
    return None


def _paid(
    job: AcceptedJob, outcome: Outcome, bundle: Bundle, config: RunConfig, bounds: Bounds
) -> Terms:
    """As the episode would have been paid that had handed in this job at the same attempt."""
    played = outcome.train_steps * bundle.manifest(bounds).prime_rl.batch_size
    return compute_terms(
        outcome,
        valid_attempt=job.valid_attempt,
        submitted=True,
        budget_share=min(1.0, played / bounds.max_rollouts),
        weights=config.reward.weights,
    )[config.reward.kind]
