"""Read a run folder into plain values; nothing is written, a running run may be read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from nestling.agent.reward import RewardKind, RewardWeights
from nestling.core.errors import StoreError
from nestling.core.rundir import RunDir
from nestling.fleet.accounting import added_up
from nestling.outer.store_log import step_reports, sweeps
from nestling.report.bases import best_untrained, better_bases
from nestling.report.episode_rows import episode_rows
from nestling.report.headline import headline
from nestling.report.job_rows import job_rows
from nestling.report.reference_rows import reference_rows
from nestling.report.run_data import EpisodeRow, JobRow, MachineCost, RunData
from nestling.report.run_info import recorded_weights, run_info
from nestling.report.step_rows import step_rows
from nestling.store import RunStore

__all__ = ["RowMemory", "gather"]


@dataclass(slots=True)
class RowMemory:
    """What an earlier look at the same run found, so that the next one reads only what is new."""

    groups: dict[str, tuple[EpisodeRow, ...]] = field(default_factory=dict)
    jobs: dict[str, JobRow] = field(default_factory=dict)
    seq: int | None = None
    """Event up to which the jobs are known; None before the first look."""


def gather(run_folder: Path, memory: RowMemory | None = None) -> RunData:
    """Everything a report shows of a run, however far it came.

    `memory`: of earlier calls for the same folder, updated; for a page that follows a run.

    Raises `StoreError` when the folder holds no run, or a damaged one.
    """
    folder = RunDir(run_folder)
    with RunStore.open_reader(folder.database) as store:
        try:
            return _gather(folder, store, memory or RowMemory())
        except (ValidationError, json.JSONDecodeError) as error:
            raise StoreError(
                f"{folder.database} holds a record this version cannot read: {error}; expected "
                f"what nestling writes; use the version that wrote it or restore a backup"
            ) from error


def _gather(folder: RunDir, store: RunStore, memory: RowMemory) -> RunData:
    info = run_info(folder, store)
    recorded = recorded_weights(info.config)
    weights = recorded or RewardWeights()
    episodes = episode_rows(store, memory.groups)
    training = tuple(
        dict.fromkeys(group.family for group in store.progress.groups(purpose="train"))
    )
    best_pre = best_untrained(store, episodes)
    better_base = better_bases(store, episodes)
    reward_kind = _reward_kind(episodes)
    references = reference_rows(episodes, training)
    steps = step_rows(
        step_reports(store),
        episodes,
        references=references,
        better_base=better_base,
        best_pre=best_pre,
        no_op=(reward_kind, weights),
    )
    found_sweeps = sweeps(store)
    seq = store.events.last_seq()
    jobs = job_rows(store, episodes, memory.jobs, _changed_jobs(store, memory.seq, seq))
    memory.seq = seq
    costs = tuple(
        MachineCost(machine=machine, usd=microusd / 1e6, minutes=seconds / 60)
        for machine, (microusd, seconds) in sorted(store.money.spent_by("machine").items())
    )
    total = store.money.total()
    return RunData(
        info=info,
        weights=weights,
        weights_known=recorded is not None,
        reward_kind=reward_kind,
        training_families=training,
        better_base=better_base,
        best_pre=best_pre,
        steps=steps,
        references=references,
        sweeps=found_sweeps,
        jobs=jobs,
        episodes=episodes,
        running_episodes=len(store.episodes.all(state="running")),
        failed_episodes=len(store.episodes.all(state="failed")),
        costs=costs,
        family_costs=tuple(added_up(store.money.spending(), "family")),
        usd=total.spent_microusd / 1e6 if costs else _usd_of_outcomes(jobs),
        usd_reserved=total.reserved_microusd / 1e6,
        headline=headline(
            steps,
            episodes,
            training=training,
            references=references,
            sweeps=found_sweeps,
            no_op=(reward_kind, weights, best_pre),
        ),
    )


def _changed_jobs(store: RunStore, since: int | None, until: int) -> list[str] | None:
    """Jobs with an event after `since`, oldest first; None when nothing is known yet."""
    if since is None:
        return None
    events = store.events.since(since, until - since) if until > since else []
    subjects = (one.subject for one in events if one.kind.startswith("job."))
    return list(dict.fromkeys(subjects))


def _reward_kind(episodes: Sequence[EpisodeRow]) -> RewardKind:
    return episodes[-1].reward_kind if episodes else "seed"


def _usd_of_outcomes(jobs: Sequence[JobRow]) -> float | None:
    return sum(job.usd for job in jobs) if jobs else None
