"""Every training job of a run with what became of it."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence

from nestling.jobs.outcome import Outcome
from nestling.report.run_data import EpisodeRow, JobRow
from nestling.store import RunStore
from nestling.store.jobs import JobRecord

__all__ = ["job_rows"]


def job_rows(
    store: RunStore,
    episodes: Sequence[EpisodeRow],
    known: MutableMapping[str, JobRow] | None = None,
    changed: Iterable[str] | None = None,
) -> tuple[JobRow, ...]:
    """Jobs in the order they were queued; without a queue, one per distinct job of the episodes.

    `known`: rows by id of an earlier call, updated; then only the jobs named in `changed` are read.
    """
    memory = {} if known is None else known
    if changed is None:
        queued = store.jobs.all(kind="run")
    else:
        queued = [job for one in changed if (job := store.jobs.get(one)).kind == "run"]
    memory.update((job.id, _queued(job)) for job in queued)
    if memory:
        return tuple(memory.values())
    jobs: dict[tuple[str, str], JobRow] = {}
    for episode in episodes:
        if episode.job_hash is not None and episode.is_valid:
            jobs.setdefault((episode.job_hash, episode.family), _played(episode))
    return tuple(jobs.values())


def _queued(job: JobRecord) -> JobRow:
    outcome = Outcome.model_validate(job.result) if job.result is not None else None
    return JobRow(
        id=job.id,
        family=job.family or "",
        state=outcome.status if outcome else job.state,
        job_hash=outcome.job_hash if outcome else None,
        base_model=outcome.base_model if outcome else None,
        reason=outcome.reason if outcome else job.reason or "",
        pre=outcome.pre if outcome else None,
        best_pre=outcome.best_pre if outcome else None,
        post=outcome.post if outcome else None,
        uplift=outcome.uplift if outcome else None,
        uplift_ci=outcome.uplift_ci if outcome else None,
        num_items=outcome.n if outcome else 0,
        train_steps=outcome.train_steps if outcome else 0,
        cpu_s=outcome.cpu_s if outcome else 0.0,
        wall_s=outcome.wall_s if outcome else 0.0,
        usd=outcome.usd if outcome else 0.0,
        worker=job.worker,
        tries=job.tries,
    )


def _played(episode: EpisodeRow) -> JobRow:
    return JobRow(
        id=(episode.job_hash or "")[:16],
        family=episode.family,
        state=episode.outcome_code.removeprefix("job_"),
        job_hash=episode.job_hash,
        base_model=episode.base_model,
        reason=episode.detail,
        pre=episode.pre,
        best_pre=episode.best_pre,
        post=episode.post,
        uplift=episode.uplift,
        uplift_ci=episode.uplift_ci,
        num_items=episode.num_items,
        train_steps=episode.train_steps,
        cpu_s=episode.job_cpu_s,
        wall_s=episode.job_wall_s,
        usd=episode.job_usd,
        worker=None,
        tries=1,
    )
