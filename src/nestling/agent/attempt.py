"""One submission of an episode: what was submitted and what the probe said."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence

from nestling.core.errors import JobRejectedError, Problem
from nestling.core.frozen import Frozen
from nestling.jobs.bounds import Bounds
from nestling.jobs.manifest import JobManifest, parse_manifest

__all__ = [
    "AttemptRecord",
    "ManifestSummary",
    "is_readable",
    "summarise_manifest",
]


class ManifestSummary(Frozen):
    """Which choices a job.toml makes."""

    base_model: str
    prime_rl: dict[str, int | float | bool | str]
    """Only the keys that were written, not the defaults."""
    rollouts: int
    """max_steps * batch_size, defaults included."""
    batch_size: int
    env_keys: tuple[str, ...] = ()


class AttemptRecord(Frozen):
    """One call of submit_job that was counted."""

    number: int
    """From 1."""
    ok: bool
    readable: bool
    """job.toml was there and is TOML; an episode without one readable attempt has submitted nothing."""
    problems: tuple[Problem, ...] = ()
    manifest: ManifestSummary | None = None
    """None when job.toml breaks the schema."""
    job_hash: str | None = None
    predicted_cpu_s: float | None = None
    """Of a job that passed."""

    @classmethod
    def rejected(
        cls,
        number: int,
        problems: Sequence[Problem],
        text: str | None,
        bounds: Bounds,
        *,
        job_hash: str | None = None,
    ) -> AttemptRecord:
        """The record of a failed submission with this job.toml (None: there is none)."""
        return cls(
            number=number,
            ok=False,
            readable=is_readable(text),
            problems=tuple(problems),
            manifest=summarise_manifest(text, bounds),
            job_hash=job_hash,
        )


def is_readable(text: str | None) -> bool:
    """Whether a job.toml is TOML at all, right or wrong."""
    if text is None:
        return False
    try:
        tomllib.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def summarise_manifest(text: str | None, bounds: Bounds) -> ManifestSummary | None:
    """The choices of a job.toml, or None when it breaks the schema."""
    if text is None:
        return None
    try:
        manifest = parse_manifest(text, bounds)
    except (JobRejectedError, RecursionError):
        return None
    return _summary(manifest)


def _summary(manifest: JobManifest) -> ManifestSummary:
    values = manifest.prime_rl
    return ManifestSummary(
        base_model=manifest.base_model,
        prime_rl={key: getattr(values, key) for key in manifest.explicit_keys},
        rollouts=values.max_steps * values.batch_size,
        batch_size=values.batch_size,
        env_keys=tuple(sorted(manifest.env)),
    )
