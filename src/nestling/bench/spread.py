"""How far good and bad jobs lie apart: the template, ways to do worse, and doing nothing.

An agent can only learn where a better job scores higher. Jobs are those of `inner.spread`, with
rubrics that pay mostly, or only, for the form of the answer.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, Final

from nestling.agent.rubrics import RUBRICS, render_rubric
from nestling.bench.progress import tell
from nestling.bench.record import Measured
from nestling.bench.room import open_worker_room, room_here, worker_room
from nestling.config import RunConfig
from nestling.core.errors import ConfigError, NestlingError
from nestling.core.seeds import stream
from nestling.families.registry import TRAINING
from nestling.inner.spread import ReferenceJob, SpreadRow, reference_jobs, spread
from nestling.inner.statistics import mean_interval
from nestling.jobs.bundle import Bundle
from nestling.jobs.template import EXACT_REWARD, TASKSET_PATH, template_job
from nestling.wiring.rooms import Room, running_stacks
from nestling.wiring.state import make_state_folder

__all__ = ["JOBS", "measure", "summarise", "with_bad_rubric"]

JOBS: Final = (
    "template",
    "lr_too_high",
    "few_samples",
    "small_base",
    "mostly_format",
    "format_only",
    "noop",
)
"""The template; three settings changed for the worse; two other rubrics; nothing done at all."""
_RUBRICS: Final = MappingProxyType({"mostly_format": "mostly_format", "format_only": "format"})
"""Job to rubric. The probe refuses `format_only`; it shows what that refusal prevents."""
_COLUMNS: Final = (
    "family", "job", "base", "untrained", "trained", "uplift", "95 % interval", "CPU s", "failed",
)  # fmt: skip


def measure(
    config: RunConfig | None = None,
    *,
    families: Sequence[str] = TRAINING,
    seeds: int = 3,
    jobs: Sequence[str] = JOBS,
    workers: int = 1,
) -> Measured:
    """Run every reference job on every family once per seed.

    Args:
        config: scoring and limits; the hidden items per score are `inner.eval_items`.
        families: which ones.
        seeds: training seeds 0, 1, ...
        jobs: names out of `JOBS`.
        workers: jobs of one family each that are measured at the same time, each in a process of its own.

    Raises:
        ConfigError: an unknown job, or the jail is missing.
    """
    if unknown := [name for name in jobs if name not in JOBS]:
        raise ConfigError(
            f"unknown job {unknown[0]!r}; expected some of {', '.join(JOBS)}; check the spelling"
        )
    used = config or RunConfig()
    rows = list(_all_rows(used, families, seeds, jobs, workers))
    return Measured(
        settings={
            "families": list(families),
            "seeds": list(range(seeds)),
            "jobs": list(jobs),
            "items": used.inner.eval_items,
            "workers": workers,
        },
        runs=tuple(row.model_dump(mode="json") for row in rows),
        figures=summarise(rows),
        columns=_COLUMNS,
        rows=tuple(_cells(row) for row in rows),
    )


def summarise(rows: Sequence[SpreadRow]) -> dict[str, Any]:
    """Per job over families, and how the template compares with the others family by family."""
    figures: dict[str, Any] = {
        "uplift_by_job": {
            name: _over_families([row for row in rows if row.job == name])
            for name in dict.fromkeys(row.job for row in rows)
        }
    }
    template = {row.family: row for row in rows if row.job == "template"}
    if template:
        figures["template"] = {
            "uplift_min": _least([row.uplift_mean for row in template.values()]),
            "uplift_lo_min": _least(
                [row.uplift_ci[0] if row.uplift_ci else None for row in template.values()]
            ),
            "cpu_s_max": max(row.cpu_s_mean for row in template.values()),
        }
        others = [row for row in rows if row.job != "template" and row.family in template]
        figures["not_below_template"] = [
            f"{row.family}/{row.job}" for row in others if not _is_below(row, template[row.family])
        ]
    return figures


def _all_rows(
    config: RunConfig, families: Sequence[str], seeds: int, jobs: Sequence[str], workers: int
) -> Iterator[SpreadRow]:
    asked = [(family, job, seeds) for family in families for job in JOBS if job in jobs]
    if workers == 1:
        with room_here(config) as room:
            for one in asked:
                yield _row(room, *one)
        return
    make_state_folder()
    with (
        tempfile.TemporaryDirectory(prefix="nestling-spread-") as scratch,
        running_stacks(config, Path(scratch) / "logs") as stacks,
        # Leaving the block ends the workers, so an interruption of this process alone is enough.
        multiprocessing.get_context("spawn").Pool(
            min(workers, len(asked)), open_worker_room, (config, scratch, stacks)
        ) as pool,
    ):
        yield from pool.imap(_worker_row, asked, chunksize=1)


def _worker_row(asked: tuple[str, str, int]) -> SpreadRow:
    """Errors with more than a text do not survive the way to another process."""
    try:
        return _row(worker_room(), *asked)
    except ConfigError:
        raise
    except NestlingError as error:
        raise NestlingError(f"{asked[0]} {asked[1]}: {error}") from None


def _row(room: Room, family: str, job: str, seeds: int) -> SpreadRow:
    """One job of one family, once per seed."""
    references = [one for one in _references(family, room) if one.name == job]
    (row,) = spread({family: references}, range(seeds), room.context, _tell)
    return row


def _references(family: str, room: Room) -> list[ReferenceJob]:
    context = room.context
    context.scorer.start()
    best = context.baselines.best_base(family, context.split, context.n).base
    others = {
        name: context.baselines.get(name, family, context.split, context.n).mean
        for name in context.bases
        if name != best
    }
    return reference_jobs(
        template_job(family),
        base=best,
        small_base=min(others, key=lambda name: others[name]) if others else best,
        rubrics={job: with_bad_rubric(family, job) for job in _RUBRICS},
    )


def with_bad_rubric(family: str, job: str) -> Bundle:
    """The family's template with the rubric of `mostly_format` or `format_only`."""
    template = template_job(family)
    text = template.files[TASKSET_PATH].decode()
    assert text.count(EXACT_REWARD) == 1, "the template pays for exact answers"
    rewards = render_rubric(RUBRICS[_RUBRICS[job]], stream(0, "spread", job, family))
    changed = text.replace(EXACT_REWARD, rewards).encode()
    return Bundle.from_files({**template.files, TASKSET_PATH: changed})


def _tell(row: SpreadRow) -> None:
    uplift = "none" if row.uplift_mean is None else f"{row.uplift_mean:+.3f}"
    tell(
        f"{row.family} {row.job}: uplift {uplift} over {len(row.uplifts)} seeds, "
        f"{row.cpu_s_mean:.1f} CPU s"
    )


def _over_families(rows: Sequence[SpreadRow]) -> dict[str, Any]:
    """Families weigh the same; the interval is over families, so it holds for new ones like them."""
    means = [row.uplift_mean for row in rows if row.uplift_mean is not None]
    interval = mean_interval(means) if means else None
    return {
        "uplift_mean": interval.mean if interval else None,
        "uplift_ci": [max(interval.lo, -1.0), min(interval.hi, 1.0)]
        if interval and interval.n > 1
        else None,
        "families": len(means),
        "cpu_s_mean": fmean(row.cpu_s_mean for row in rows),
        "failures": sum(len(row.failures) for row in rows),
    }


def _least(values: Sequence[float | None]) -> float | None:
    """None when one is missing: a failed job must not look like a good one."""
    known = [value for value in values if value is not None]
    return min(known) if len(known) == len(values) else None


def _is_below(row: SpreadRow, template: SpreadRow) -> bool:
    """A job without a score is below every job that has one."""
    if template.uplift_mean is None:
        return False
    return row.uplift_mean is None or row.uplift_mean < template.uplift_mean


def _cells(row: SpreadRow) -> tuple[str, ...]:
    return (
        row.family,
        row.job,
        row.base_model,
        _number(row.best_pre),
        _number(row.post_mean),
        "-" if row.uplift_mean is None else f"{row.uplift_mean:+.3f}",
        "-" if row.uplift_ci is None else f"{row.uplift_ci[0]:+.3f} to {row.uplift_ci[1]:+.3f}",
        f"{row.cpu_s_mean:.1f}",
        ", ".join(sorted(set(row.failures))) or "-",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
