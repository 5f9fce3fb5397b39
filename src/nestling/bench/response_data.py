"""What jobs of known choices earned: job-response data and records of `bench spread`, read as trials.

Each line of job-response data is one trained job: its family, its choices, its training seed and its scores. A spread
record holds reference jobs by name; their choices are those of `inner.spread`.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pydantic import Field, ValidationError

from nestling.agent.reward import RewardKind, compute_terms
from nestling.agent.rubrics import RUBRICS
from nestling.core.errors import ConfigError, JobRejectedError
from nestling.core.frozen import Frozen
from nestling.families.registry import get
from nestling.inner.spread import SpreadRow, reference_jobs
from nestling.jobs.bounds import SMALL
from nestling.jobs.manifest import PrimeRl
from nestling.jobs.manifest_checks import Scalar
from nestling.jobs.outcome import Outcome, OutcomeStatus
from nestling.jobs.template import template_job

__all__ = ["EVAL_RANGE", "Job", "Trial", "read_trials"]

EVAL_RANGE: Final = "eval"
"""Level of `data`: the range that the family's spec gives for its evaluation."""
_SIZE: Final = ("max_steps", "batch_size")
_ALONE: Final = ("group_size", "temperature")
"""Settings that are a choice by themselves; those that are not named here are the update's."""
_SPREAD_RUBRICS: Final = MappingProxyType(
    {"mostly_format": "mostly_format", "format_only": "format"}
)
"""Reference job to rubric; the others pay for exact answers."""
_NOOP: Final = "noop"


class Job(NamedTuple):
    """A job by its choices, each a short text; equal texts are equal choices."""

    base: str
    data: str
    """Difficulties of the training rows: `lo..hi`, or `eval`."""
    rubric: str
    size: str
    """Steps x rollouts of a step."""
    group_size: str
    temperature: str
    update: str
    """Learning rate, and whatever else of the update is not as by default."""

    def label(self) -> str:
        """All choices on one line."""
        return (
            f"{self.base}, data {self.data}, {self.rubric}, {self.size}, groups of "
            f"{self.group_size}, temperature {self.temperature}, {self.update}"
        )


class Trial(Frozen):
    """One job trained once."""

    family: str
    jobs: tuple[Job, ...]
    """Its name, or both where the family's evaluation range is also given in numbers."""
    seed: int
    reward: float


def read_trials(paths: Sequence[Path], kind: RewardKind) -> list[Trial]:
    """Every job of the files, paid as if it had been accepted at the first attempt.

    A job that the probe refuses is paid nothing, one that died its validation alone. The same job
    with the same seed counts once.

    Raises:
        ConfigError: a file that is neither kind of data, files that were measured with other bases or items, or
            `kind` is paired and a file has no interval of each job.
    """
    found: dict[tuple[str, tuple[Job, ...], int], float] = {}
    best_pre: dict[str, float] = {}
    for path in paths:
        for one in _measurements(path):
            known = best_pre.setdefault(one.family, one.outcome.best_pre or 0.0)
            if not math.isclose(known, one.outcome.best_pre or 0.0, abs_tol=1e-9):
                raise ConfigError(
                    f"{path}: the best untrained score on {one.family} is {one.outcome.best_pre}, elsewhere {known}; "
                    "expected the same bases and hidden items in all data; compare the files one by one"
                )
            found.setdefault((one.family, one.jobs, one.seed), _reward(one, kind, path))
    return [
        Trial(family=family, jobs=jobs, seed=seed, reward=reward)
        for (family, jobs, seed), reward in found.items()
    ]


class _Measurement(NamedTuple):
    family: str
    jobs: tuple[Job, ...]
    seed: int
    outcome: Outcome
    rollouts: int
    is_refused: bool


class _Response(Frozen):
    """One line of job-response data."""

    fam: str
    base: str
    rub: str
    span: tuple[int, int] | None
    """None: the family's evaluation range."""
    settings: dict[str, Scalar] = Field(alias="set")
    seed: int
    status: OutcomeStatus
    reason: str
    detail: str
    pre: float | None
    best: float
    post: float | None
    up: float | None
    ci: tuple[float, float] | None
    cpu: float
    wall: float
    rew: list[float]
    gr: list[int]


def _measurements(path: Path) -> Iterator[_Measurement]:
    text = _text(path)
    try:
        if text.lstrip().startswith('{"fam"'):
            for line in text.splitlines():
                yield _of_response(_Response.model_validate_json(line))
            return
        record = json.loads(text)
        if not isinstance(record, dict) or record.get("name") != "spread":
            raise ConfigError(_unknown(path, "it is neither"))
        for row in record["runs"]:
            yield from _of_row(SpreadRow.model_validate(row))
    except (ValidationError, JobRejectedError, KeyError, ValueError) as error:
        raise ConfigError(_unknown(path, str(error).splitlines()[0])) from error


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(_unknown(path, str(error))) from error


def _unknown(path: Path, why: str) -> str:
    return (
        f"{path} cannot be read: {why}; expected job-response data such as "
        "results/calibration/job-response.jsonl.gz, or what `nestling bench spread` writes"
    )


def _of_response(line: _Response) -> _Measurement:
    steps = int(line.settings["max_steps"])
    return _Measurement(
        family=line.fam,
        jobs=_jobs(line.fam, line.base, line.span, line.rub, line.settings),
        seed=line.seed,
        outcome=Outcome(
            job_hash="",
            family=line.fam,
            base_model=line.base,
            status=line.status,
            reason=line.reason,
            best_pre=line.best,
            post=line.post,
            uplift=line.up,
            uplift_ci=line.ci,
            train_steps=steps,
        ),
        rollouts=steps * int(line.settings["batch_size"]),
        is_refused=RUBRICS[line.rub].is_refused,
    )


def _of_row(row: SpreadRow) -> Iterator[_Measurement]:
    """One per seed; which seeds failed is not recorded, so that they come last."""
    if row.job == _NOOP:
        return
    settings = row.settings or _settings_by_name(row)
    values = PrimeRl.resolve(dict(settings))
    rubric = _SPREAD_RUBRICS.get(row.job, "exact")
    jobs = _jobs(row.family, row.base_model, None, rubric, settings)
    ends: list[float | str] = [*row.uplifts, *row.failures]
    for seed, end in zip(row.seeds, ends, strict=False):
        outcome = Outcome(
            job_hash="",
            family=row.family,
            base_model=row.base_model,
            status="failed" if isinstance(end, str) else "succeeded",
            reason=end if isinstance(end, str) else "",
            best_pre=row.best_pre,
            post=None if isinstance(end, str) else (row.best_pre or 0.0) + end,
            uplift=None if isinstance(end, str) else end,
            train_steps=values.max_steps,
        )
        yield _Measurement(
            family=row.family,
            jobs=jobs,
            seed=seed,
            outcome=outcome,
            rollouts=values.max_steps * values.batch_size,
            is_refused=RUBRICS[rubric].is_refused,
        )


def _settings_by_name(row: SpreadRow) -> dict[str, Scalar]:
    """Of a record that did not keep them: those of today's reference job of that name."""
    references = reference_jobs(
        template_job(row.family), base=row.base_model, small_base=row.base_model
    )
    bundles = {one.name: one.bundle for one in references}
    bundle = bundles.get("template" if row.job in _SPREAD_RUBRICS else row.job)
    if bundle is None:
        raise ValueError(f"unknown reference job {row.job!r}")
    manifest = bundle.manifest()
    return {key: getattr(manifest.prime_rl, key) for key in manifest.explicit_keys}


def _jobs(
    family: str,
    base: str,
    span: tuple[int, int] | None,
    rubric: str,
    settings: Mapping[str, Scalar],
) -> tuple[Job, ...]:
    given = dict(settings)
    values = PrimeRl.resolve(given)
    usual = PrimeRl.resolve({})
    update = [f"lr {values.lr:g}"] + [
        f"{key} {given[key]}"
        for key in sorted(given)
        if key not in ("lr", *_SIZE, *_ALONE) and given[key] != getattr(usual, key)
    ]
    evaluated = tuple(get(family).eval_range)
    lo, hi = span or evaluated
    ranges = [f"{lo}..{hi}"] if (lo, hi) != evaluated else [EVAL_RANGE, f"{lo}..{hi}"]
    return tuple(
        Job(
            base=base,
            data=data,
            rubric=rubric,
            size=f"{values.max_steps} x {values.batch_size}",
            group_size=str(values.group_size),
            temperature=f"{values.temperature:g}",
            update=", ".join(update),
        )
        for data in ranges
    )


def _reward(one: _Measurement, kind: RewardKind, path: Path) -> float:
    outcome = one.outcome
    if kind == "paired" and outcome.uplift is not None and outcome.uplift_ci is None:
        raise ConfigError(
            f"{path} has no interval of each job, which the paired reward needs; expected job-response data; "
            "use --reward seed"
        )
    terms: Mapping[Any, Any] = compute_terms(
        outcome,
        valid_attempt=None if one.is_refused else 1,
        submitted=True,
        budget_share=one.rollouts / SMALL.max_rollouts,
    )
    return float(terms[kind].total)
