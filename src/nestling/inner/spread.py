"""How far good and bad jobs lie apart: a table of reference jobs over families and seeds.

A learning signal for the agent exists only where a better job scores higher; this measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from nestling.core.frozen import Frozen
from nestling.inner.noop import noop_outcome
from nestling.inner.run import InnerContext, run_job
from nestling.inner.statistics import mean_interval
from nestling.jobs.bounds import Bounds
from nestling.jobs.bundle import Bundle
from nestling.jobs.manifest import JobManifest, render_manifest
from nestling.jobs.manifest_checks import Scalar
from nestling.jobs.outcome import Outcome

__all__ = ["ReferenceJob", "SpreadRow", "reference_jobs", "spread", "with_settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceJob:
    """One row of the table before it is measured."""

    name: str
    bundle: Bundle | None
    """None for the no-op."""


class SpreadRow(Frozen):
    """One reference job on one family."""

    family: str
    job: str
    base_model: str
    seeds: tuple[int, ...]
    settings: dict[str, Scalar] = Field(default_factory=dict)
    """The `[prime_rl]` keys that the job sets; empty for the no-op, and in records that did not keep them."""
    n: int
    """Hidden items per seed; the same items for all."""
    uplifts: tuple[float, ...]
    """One per seed that succeeded."""
    uplift_mean: float | None
    """None when no seed succeeded."""
    uplift_ci: tuple[float, float] | None
    """95 % over seeds (t); a single seed carries the interval over its items."""
    post_mean: float | None
    best_pre: float | None
    cpu_s_mean: float
    """Training and post-score."""
    wall_s_mean: float
    failures: tuple[str, ...]
    """Reason code of every seed that did not succeed."""


def reference_jobs(
    template: Bundle, *, base: str, small_base: str, rubrics: Mapping[str, Bundle] | None = None
) -> list[ReferenceJob]:
    """The human template, ways to do worse, and doing nothing.

    Args:
        template: the worked job of one family.
        base: the stronger base model.
        small_base: the weaker one.
        rubrics: the template with other rubrics, by name, for example one that pays mostly for
            the form of the answer.
    """
    good = with_settings(template, base_model=base)
    jobs = [
        ReferenceJob(name="template", bundle=good),
        ReferenceJob(name="lr_too_high", bundle=with_settings(good, lr=3e-3)),
        ReferenceJob(
            name="few_samples",
            bundle=with_settings(
                good,
                max_steps=1,
                batch_size=16,
                group_size=8,
                scheduler=None,
                warmup_steps=None,
                decay_steps=None,
                min_lr=None,
            ),
        ),
        ReferenceJob(name="small_base", bundle=with_settings(template, base_model=small_base)),
    ]
    for name, bundle in (rubrics or {}).items():
        jobs.append(ReferenceJob(name=name, bundle=with_settings(bundle, base_model=base)))
    return [*jobs, ReferenceJob(name="noop", bundle=None)]


def with_settings(
    bundle: Bundle, *, base_model: str | None = None, **prime_rl: int | float | bool | str | None
) -> Bundle:
    """The same job with other settings; a value of None removes a key.

    Raises:
        JobRejectedError: when the new settings break a bound.
    """
    manifest = bundle.manifest()
    settings = _settings(manifest) | prime_rl
    changed = JobManifest.build(
        base_model or manifest.base_model,
        env=dict(manifest.env),
        **{key: value for key, value in settings.items() if value is not None},
    )
    files = dict(bundle.files) | {"job.toml": render_manifest(changed).encode()}
    return Bundle.from_files(files)


def spread(
    jobs: Mapping[str, Sequence[ReferenceJob]],
    seeds: Sequence[int],
    context: InnerContext,
    log: Callable[[SpreadRow], None] = lambda _: None,
) -> Iterator[SpreadRow]:
    """Run every job of every family once per seed; rows are yielded as they are finished."""
    for family, references in jobs.items():
        for reference in references:
            outcomes = [
                _run(reference, family, replace(context, seed=seed))
                for seed in (seeds if reference.bundle is not None else seeds[:1])
            ]
            row = _row(reference, family, seeds, outcomes, context.bounds)
            log(row)
            yield row


def _run(reference: ReferenceJob, family: str, context: InnerContext) -> Outcome:
    if reference.bundle is None:
        return noop_outcome(_stronger_base(family, context), family, context)
    return run_job(reference.bundle, family, context, lambda _: None)


def _stronger_base(family: str, context: InnerContext) -> str:
    context.scorer.start()
    return context.baselines.best_base(family, context.split, context.n).base


def _settings(manifest: JobManifest) -> dict[str, Any]:
    return {key: getattr(manifest.prime_rl, key) for key in manifest.explicit_keys}


def _row(
    reference: ReferenceJob,
    family: str,
    seeds: Sequence[int],
    outcomes: Sequence[Outcome],
    bounds: Bounds,
) -> SpreadRow:
    uplifts = [outcome.uplift for outcome in outcomes if outcome.uplift is not None]
    posts = [outcome.post for outcome in outcomes if outcome.post is not None]
    interval = mean_interval(uplifts) if uplifts else None
    over_seeds = (interval.lo, interval.hi) if interval is not None else None
    return SpreadRow(
        family=family,
        job=reference.name,
        base_model=outcomes[0].base_model,
        seeds=tuple(seeds),
        settings=_settings(reference.bundle.manifest(bounds)) if reference.bundle else {},
        n=max(outcome.n for outcome in outcomes),
        uplifts=tuple(uplifts),
        uplift_mean=interval.mean if interval is not None else None,
        uplift_ci=outcomes[0].uplift_ci if len(outcomes) == 1 else over_seeds,
        post_mean=mean_interval(posts).mean if posts else None,
        best_pre=outcomes[0].best_pre,
        cpu_s_mean=sum(outcome.cpu_s for outcome in outcomes) / len(outcomes),
        wall_s_mean=sum(outcome.wall_s for outcome in outcomes) / len(outcomes),
        failures=tuple(outcome.reason for outcome in outcomes if outcome.status != "succeeded"),
    )
