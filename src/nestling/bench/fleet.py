"""Seconds and money of a job by machine type and base model, and where it is cheapest.

This machine's type is measured: real jobs, probed, trained and scored by a real fleet on its slots.
A type with past jobs in the state folder is scaled from them to the same jobs (`history`). Of the
rest only the price is known (`price`): the time that a job may take there before it costs more
than the cheapest.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Literal

from nestling.bench.progress import tell
from nestling.bench.record import Measured
from nestling.config import RunConfig
from nestling.core.errors import ConfigError, FleetError
from nestling.core.frozen import Frozen
from nestling.core.rundir import RunDir
from nestling.families import bases
from nestling.families.registry import TRAINING
from nestling.fleet.budget import Price, load_prices
from nestling.fleet.predict import corrected_s
from nestling.fleet.runner import FleetRunner
from nestling.inner.spread import with_settings
from nestling.jobs.bundle import Bundle
from nestling.jobs.template import template_job
from nestling.store import GroupCommit
from nestling.store.history import PastJob
from nestling.store.run_store import RunStore
from nestling.wiring.fleets import open_fleet
from nestling.wiring.state import open_account

__all__ = ["Cell", "JobTime", "matrix", "measure", "prediction_error"]

_STEPS = (8, 4, 12, 16, 2, 10)
"""Of the jobs of one base, in turns: short and long ones."""
_FEWEST = 3
"""Past jobs that say something about a machine type."""
_COLUMNS = (
    "machine", "base", "known from", "jobs", "seconds a job", "USD a job", "USD an hour",
    "break-even s", "uplift",
)  # fmt: skip


class JobTime(Frozen):
    """One real job."""

    family: str
    base: str
    steps: int
    status: str
    bound_s: float
    """Seconds that its settings let expect."""
    seconds: float
    """Seconds that it kept its worker."""
    cpu_s: float
    """Processor seconds of it: what a quiet core would have taken."""
    usd: float
    uplift: float | None


class Cell(Frozen):
    """One machine type with one base."""

    machine: str
    base: str
    source: Literal["measured", "history", "price"]
    jobs: int
    """Behind the figure."""
    seconds: float | None
    """Mean of a job; None where only the price is known."""
    usd: float | None
    usd_per_hour: float
    """Of one slot."""
    break_even_s: float | None = None
    """A job that takes longer there costs more than on the cheapest machine of its base."""
    uplift: float | None = None
    """Mean of the measured jobs: cheap jobs that teach nothing are no bargain."""


def measure(
    config: RunConfig | None = None,
    *,
    families: Sequence[str] | None = None,
    jobs: int = 6,
    models: Sequence[str] | None = None,
    prices: Mapping[str, Price] | None = None,
) -> Measured:
    """Run `jobs` jobs per base and family on this machine's slots and fill in the matrix.

    Args:
        config: fleet, scoring and limits; `fleet.machine` names this machine's type.
        families: whose template jobs are run; None: the first two.
        jobs: of each base and family; they differ in steps.
        models: base models; None: all shipped ones.
        prices: price table; None: the shipped one.

    Raises:
        ConfigError: the jail is missing, or a name is unknown.
        FleetError: workers cannot be started, or a template job does not pass the probe.
    """
    used = config or RunConfig()
    chosen = tuple(models or bases.names())
    if unknown := sorted(set(chosen) - set(bases.names())):
        raise ConfigError(
            f"unknown base {unknown[0]!r}; expected some of {', '.join(bases.names())}"
        )
    names = tuple(families or TRAINING[:2])
    times = asyncio.run(_run_jobs(used, names, list(_jobs(names, chosen, jobs))))
    with open_account() as account:
        past = {
            machine: account.history.newest(machine=machine, limit=500)
            for machine in account.history.machines()
        }
    cells = matrix(times, used.fleet.machine, prices or load_prices(), past)
    return Measured(
        settings={
            "families": list(names),
            "bases": list(chosen),
            "jobs_per_base_and_family": jobs,
            "machine": used.fleet.machine,
            "items": used.inner.eval_items,
        },
        runs=tuple(one.model_dump(mode="json") for one in times),
        figures={
            "matrix": [cell.model_dump(mode="json") for cell in cells],
            "cheapest": {base: _name(cheapest(cells, base)) for base in chosen},
            "prediction": prediction_error(times),
            "failed": sum(one.status != "succeeded" for one in times),
        },
        columns=_COLUMNS,
        rows=tuple(_cells(cell) for cell in cells),
    )


def matrix(
    times: Sequence[JobTime],
    machine: str,
    prices: Mapping[str, Price],
    past: Mapping[str, Sequence[PastJob]],
) -> list[Cell]:
    """Every machine type of the price table with every base of the jobs, cheapest first."""
    cells = []
    for base in dict.fromkeys(one.base for one in times):
        done = [one for one in times if one.base == base and one.status == "succeeded"]
        known = [
            _known(name, base, price, done if name == machine else None, past.get(name, ()), times)
            for name, price in prices.items()
        ]
        best = cheapest(known, base)
        cells += [
            cell
            if best is None or best.usd is None or cell.usd_per_hour == 0
            else cell.model_copy(
                update={"break_even_s": round(best.usd / cell.usd_per_hour * 3600, 2)}
            )
            for cell in known
        ]
    return sorted(cells, key=lambda cell: (cell.base, cell.usd is None, cell.usd or 0.0))


def cheapest(cells: Sequence[Cell], base: str) -> Cell | None:
    """The machine type whose jobs on a base cost least, of those where that is known."""
    known = [cell for cell in cells if cell.base == base and cell.usd is not None]
    return min(known, key=lambda cell: cell.usd or 0.0, default=None)


def prediction_error(times: Sequence[JobTime]) -> dict[str, Any]:
    """How far predictions are off: standard deviation of the logarithm of measured over predicted.

    `by_bounds`: the figure of the probe. `by_history`: corrected by `fleet.predict` from the other
    jobs of the same base and family. `wall` is what a worker was kept, with
    whatever else the machine did; `cpu` is the job alone.
    """
    done = [one for one in times if one.status == "succeeded" and one.bound_s > 0]
    return {
        "jobs": len(done),
        "wall": _error(done, [one.seconds for one in done]),
        "cpu": _error(done, [one.cpu_s for one in done]),
    }


def _error(done: Sequence[JobTime], took_s: Sequence[float]) -> dict[str, float | None]:
    if len(done) < _FEWEST or min(took_s) <= 0:
        return {"ratio_median": None, "by_bounds": None, "by_history": None}
    jobs = [_past(one, seconds) for one, seconds in zip(done, took_s, strict=True)]
    ratios = [one.seconds / one.bound_s for one in jobs]
    corrected = []
    for number, one in enumerate(jobs):
        kin = [
            other
            for at, other in enumerate(jobs)
            if at != number and (other.base, other.family) == (one.base, one.family)
        ]
        if len(kin) >= _FEWEST:
            corrected.append(math.log(one.seconds / corrected_s(one.bound_s, kin)))
    return {
        "ratio_median": round(median(ratios), 3),
        "by_bounds": round(stdev(math.log(ratio) for ratio in ratios), 3),
        "by_history": round(stdev(corrected), 3) if len(corrected) >= _FEWEST else None,
    }


def _past(one: JobTime, seconds: float) -> PastJob:
    return PastJob(
        family=one.family,
        base=one.base,
        machine="",
        turns=0.0,
        bound_s=one.bound_s,
        seconds=seconds,
    )


def _known(
    machine: str,
    base: str,
    price: Price,
    done: Sequence[JobTime] | None,
    past: Sequence[PastJob],
    times: Sequence[JobTime],
) -> Cell:
    cell = Cell(
        machine=machine,
        base=base,
        source="price",
        jobs=0,
        seconds=None,
        usd=None,
        usd_per_hour=price.usd_per_hour,
    )
    if done:
        seconds = fmean(one.seconds for one in done)
        uplifts = [one.uplift for one in done if one.uplift is not None]
        return cell.model_copy(
            update={
                "source": "measured",
                "jobs": len(done),
                "seconds": round(seconds, 2),
                "usd": fmean(one.usd for one in done),
                "uplift": round(fmean(uplifts), 4) if uplifts else None,
            }
        )
    kin = [one for one in past if one.base == base]
    if len(kin) < _FEWEST:
        return cell
    seconds = fmean(corrected_s(one.bound_s, kin) for one in times if one.base == base)
    return cell.model_copy(
        update={
            "source": "history",
            "jobs": len(kin),
            "seconds": round(seconds, 2),
            "usd": seconds / 3600 * price.usd_per_hour,
        }
    )


def _jobs(
    families: Sequence[str], models: Sequence[str], jobs: int
) -> Iterator[tuple[str, str, int, Bundle]]:
    """Family, base, steps and bundle; each bundle differs, as the same job would be done once."""
    for family in families:
        template = template_job(family)
        lr = template.manifest().prime_rl.lr
        for base in models:
            for number in range(jobs):
                steps = _STEPS[number % len(_STEPS)]
                bundle = with_settings(
                    template,
                    base_model=base,
                    max_steps=steps,
                    batch_size=64,
                    lr=lr * (1 + 0.01 * (number // len(_STEPS))),
                    warmup_steps=None,
                    decay_steps=None,
                )
                yield family, base, steps, bundle


async def _run_jobs(
    config: RunConfig, families: Sequence[str], asked: Sequence[tuple[str, str, int, Bundle]]
) -> list[JobTime]:
    with tempfile.TemporaryDirectory(prefix="nestling-fleet-bench-") as scratch:
        run = RunDir.create(Path(scratch) / "run")
        with closing(RunStore(run.database)) as store, run.lock():
            writer = GroupCommit(store)
            try:
                async with open_fleet(config, run, writer) as fleet:
                    for family in families:
                        await fleet.run(_first_job(family), family)
                    async with asyncio.TaskGroup() as group:
                        tasks = [
                            group.create_task(_run_one(fleet, store, number, *one))
                            for number, one in enumerate(asked)
                        ]
                return [task.result() for task in tasks]
            finally:
                await asyncio.to_thread(writer.close)


def _first_job(family: str) -> Bundle:
    """A small job that is not counted: the first of a family waits for the untrained scores."""
    return with_settings(
        template_job(family),
        max_steps=1,
        batch_size=16,
        group_size=8,
        scheduler=None,
        warmup_steps=None,
        decay_steps=None,
        min_lr=None,
    )


async def _run_one(
    fleet: FleetRunner,
    store: RunStore,
    number: int,
    family: str,
    base: str,
    steps: int,
    bundle: Bundle,
) -> JobTime:
    episode = fleet.for_episode(f"bench-{number}", "bench")
    report = await episode.check(bundle, family)
    if not report.ok:
        raise FleetError(
            f"the template job of {family} on {base} does not pass the probe: "
            f"{'; '.join(report.lines())}"
        )
    outcome = await episode.run(bundle, family)
    job = next(
        one
        for one in store.jobs.all(kind="run")
        if one.payload["job_hash"] == bundle.job_hash and one.family == family
    )
    paid = [record for record in store.money.all() if record.job_id == job.id]
    tell(f"{family} {base} {steps} steps: {outcome.status}, {paid[-1].seconds:.1f} s")
    return JobTime(
        family=family,
        base=base,
        steps=steps,
        status=outcome.status,
        bound_s=report.predicted_cpu_s or 0.0,
        seconds=round(paid[-1].seconds, 3),
        cpu_s=round(outcome.cpu_s, 3),
        usd=sum(record.spent_microusd for record in paid) / 1e6,
        uplift=outcome.uplift,
    )


def _name(cell: Cell | None) -> str | None:
    return None if cell is None else cell.machine


def _cells(cell: Cell) -> tuple[str, ...]:
    return (
        cell.machine,
        cell.base,
        cell.source,
        str(cell.jobs or "-"),
        "-" if cell.seconds is None else f"{cell.seconds:.1f}",
        "-" if cell.usd is None else f"{cell.usd:.6f}",
        f"{cell.usd_per_hour:g}",
        "-" if cell.break_even_s is None else f"{cell.break_even_s:.1f}",
        "-" if cell.uplift is None else f"{cell.uplift:+.3f}",
    )
