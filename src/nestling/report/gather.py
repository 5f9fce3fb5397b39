"""Read a run folder, or an export of one, into plain values; a running run may be read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from nestling.core.errors import StoreError
from nestling.core.rundir import RunDir
from nestling.fleet.accounting import added_up
from nestling.outer.store_log import step_reports, sweeps
from nestling.report.arc_data import is_arc_data, read_arc_data
from nestling.report.assemble import assemble
from nestling.report.bases import shown_baselines
from nestling.report.episode_rows import episode_rows
from nestling.report.job_rows import job_rows
from nestling.report.run_data import EpisodeRow, JobRow, MachineCost, RunData
from nestling.report.run_info import recorded_weights, run_info
from nestling.report.run_records import RunRecords
from nestling.store import RunStore

__all__ = ["RowMemory", "gather", "read_records"]


@dataclass(slots=True)
class RowMemory:
    """What an earlier look at the same run found, so that the next one reads only what is new."""

    groups: dict[str, tuple[EpisodeRow, ...]] = field(default_factory=dict)
    jobs: dict[str, JobRow] = field(default_factory=dict)
    seq: int | None = None
    """Event up to which the jobs are known; None before the first look."""


def gather(folder: Path, memory: RowMemory | None = None) -> RunData:
    """Everything a report shows of a run, however far it came.

    Args:
        folder: of a run, or of the data that `write_arc_data` kept of one.
        memory: of earlier calls for the same run folder, updated; for a page that follows a run.

    Raises `StoreError` when the folder holds no run, or a damaged one.
    """
    return assemble(read_records(folder, memory))


def read_records(folder: Path, memory: RowMemory | None = None) -> RunRecords:
    """What `gather` computes from; arguments and errors are the same."""
    if is_arc_data(folder):
        return read_arc_data(folder)
    run = RunDir(folder)
    with RunStore.open_reader(run.database) as store:
        try:
            return _read(run, store, memory or RowMemory())
        except (ValidationError, json.JSONDecodeError) as error:
            raise StoreError(
                f"{run.database} holds a record this version cannot read: {error}; expected "
                f"what nestling writes; use the version that wrote it or restore a backup"
            ) from error


def _read(folder: RunDir, store: RunStore, memory: RowMemory) -> RunRecords:
    info = run_info(folder, store)
    episodes = episode_rows(store, memory.groups)
    seq = store.events.last_seq()
    jobs = job_rows(store, episodes, memory.jobs, _changed_jobs(store, memory.seq, seq))
    memory.seq = seq
    costs = tuple(
        MachineCost(machine=machine, usd=microusd / 1e6, minutes=seconds / 60)
        for machine, (microusd, seconds) in sorted(store.money.spent_by("machine").items())
    )
    total = store.money.total()
    return RunRecords(
        info=info,
        weights=recorded_weights(info.config),
        training_families=tuple(
            dict.fromkeys(group.family for group in store.progress.groups(purpose="train"))
        ),
        baselines=shown_baselines(store),
        steps=tuple(step_reports(store)),
        sweeps=sweeps(store),
        episodes=episodes,
        jobs=jobs,
        running_episodes=len(store.episodes.all(state="running")),
        failed_episodes=len(store.episodes.all(state="failed")),
        costs=costs,
        family_costs=tuple(added_up(store.money.spending(), "family")),
        usd=total.spent_microusd / 1e6 if costs else None,
        usd_reserved=total.reserved_microusd / 1e6,
    )


def _changed_jobs(store: RunStore, since: int | None, until: int) -> list[str] | None:
    """Jobs with an event after `since`, oldest first; None when nothing is known yet."""
    if since is None:
        return None
    events = store.events.since(since, until - since) if until > since else []
    subjects = (one.subject for one in events if one.kind.startswith("job."))
    return list(dict.fromkeys(subjects))
