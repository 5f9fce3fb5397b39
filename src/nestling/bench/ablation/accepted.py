"""The accepted jobs of a policy, out of a run folder or a folder of `eval-agent`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nestling.core.errors import ConfigError
from nestling.core.rundir import RunDir
from nestling.core.seeds import stream
from nestling.jobs.bundle import Bundle
from nestling.report.episode_rows import episode_rows
from nestling.report.run_data import EpisodeRow
from nestling.report.samples import submitted_files
from nestling.store import RunStore

__all__ = ["Accepted", "AcceptedJob", "accepted_jobs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedJob:
    """One accepted job and where it comes from."""

    episode_id: str
    task: str
    """Equal for episodes that were given the same task."""
    family: str
    valid_attempt: int
    """From 1."""
    bundle: Bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Jobs of one policy."""

    whose: str
    """Arm, or the training steps, in words."""
    jobs: tuple[AcceptedJob, ...]
    num_episodes: int
    """Finished ones of this policy."""
    num_accepted: int
    """Before jobs were drawn."""
    not_kept: int
    """Drawn jobs whose files are not in the folder."""


def accepted_jobs(
    folder: Path, *, arm: str | None = None, last: int = 5, per_family: int = 8, seed: int = 0
) -> Accepted:
    """Draw accepted jobs, at most `per_family` of each family, without replacement.

    Args:
        folder: of a run, or of `eval-agent`.
        arm: a measured policy; None: the agent in training.
        last: of training, how many of the last steps.
        per_family: how many.
        seed: of the draw.

    Raises:
        ConfigError: there is no such arm, or it has no accepted job.
        StoreError: no run, or a damaged one.
    """
    run = RunDir(folder)
    with RunStore.open_reader(run.database) as store:
        rows = episode_rows(store)
        played, whose = _of_policy(rows, arm, last, folder)
        valid = [row for row in played if row.valid_attempt is not None and row.job_hash]
        jobs: list[AcceptedJob] = []
        drawn = 0
        for family in dict.fromkeys(row.family for row in valid):
            places = [place for place, row in enumerate(valid) if row.family == family]
            rng = stream(seed, "ablation", family)
            kept = sorted(rng.sample(places, min(per_family, len(places))))
            drawn += len(kept)
            found = (_job(run, store, valid[place]) for place in kept)
            jobs += [one for one in found if one is not None]
    if not jobs:
        raise ConfigError(
            f"{folder}: {whose} has no accepted job whose files were kept, in {len(played)} episodes; expected at "
            "least one; choose another --arm or more --last steps"
        )
    return Accepted(
        whose=whose,
        jobs=tuple(jobs),
        num_episodes=len(played),
        num_accepted=len(valid),
        not_kept=drawn - len(jobs),
    )


def _of_policy(
    rows: Sequence[EpisodeRow], arm: str | None, last: int, folder: Path
) -> tuple[list[EpisodeRow], str]:
    arms = list(dict.fromkeys(row.arm for row in rows if row.arm is not None))
    if arm is not None:
        if arm not in arms:
            raise ConfigError(
                f"{folder} measured no arm {arm!r}; expected one of {', '.join(arms) or 'none'}; check --arm"
            )
        return [row for row in rows if row.arm == arm], f"arm {arm}"
    steps = sorted({row.step for row in rows if row.purpose == "train" and row.step is not None})
    if not steps:
        raise ConfigError(
            f"{folder} has no step of training; expected a measured policy; give --arm, one of "
            f"{', '.join(arms) or 'none'}"
        )
    wanted = steps[-last:]
    played = [row for row in rows if row.purpose == "train" and row.step in wanted]
    return played, f"training steps {wanted[0]} to {wanted[-1]}"


def _job(run: RunDir, store: RunStore, row: EpisodeRow) -> AcceptedJob | None:
    assert row.job_hash is not None
    assert row.valid_attempt is not None
    files = submitted_files(run, store, row.job_hash)
    if files is None:
        return None
    return AcceptedJob(
        episode_id=row.id,
        task=row.group_id if row.purpose == "train" else row.id,
        family=row.family,
        valid_attempt=row.valid_attempt,
        bundle=Bundle.from_files({path: text.encode() for path, text in files.items()}),
    )
