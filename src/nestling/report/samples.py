"""A few episodes in full: what the agent wrote, what it was told, what its job did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nestling.agent.episode_result import EpisodeResult
from nestling.agent.reward import RewardWeights
from nestling.core.errors import JobFailedError, JobRejectedError
from nestling.core.rundir import RunDir
from nestling.fleet.handlers import unpack_bundle
from nestling.report.arithmetic import reward_lines
from nestling.report.episode_rows import read_result
from nestling.report.run_data import EpisodeRow, RunData
from nestling.store import RunStore

__all__ = ["EpisodeDetail", "Pick", "pick_episodes", "read_details", "submitted_files"]

Place = Literal["best", "median", "worst"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """An episode worth showing in full, and why."""

    row: EpisodeRow
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeDetail:
    """One episode with its text. All of it was written by the agent or its job: never trust it."""

    pick: Pick
    result: EpisodeResult
    files: Mapping[str, str] | None
    """Text of the accepted job by path, else of its last submission; None when it was not kept."""
    arithmetic: tuple[str, ...]


def pick_episodes(data: RunData) -> list[Pick]:
    """Best, median and worst reward of each family.

    In training families among all training episodes; elsewhere among those of the newest measured
    policy, the agent after training where there is one. Equal rewards: the later episode.
    """
    picks = []
    families = dict.fromkeys([*data.training_families, *(one.family for one in data.episodes)])
    for family in families:
        played = [one for one in data.train_episodes if one.family == family]
        if not played:
            measured = [one for one in data.episodes if one.family == family and one.arm]
            newest = max(measured, key=lambda one: one.step or 0)
            played = [one for one in measured if one.arm == newest.arm]
        picks += _best_median_worst(played)
    return picks


def read_details(
    run_folder: Path, picks: Sequence[Pick], weights: RewardWeights
) -> list[EpisodeDetail]:
    """The picked episodes in full; raises `StoreError` when the run is damaged."""
    folder = RunDir(run_folder)
    with RunStore.open_reader(folder.database) as store:
        details = []
        for pick in picks:
            result = read_result(store, store.episodes.get(pick.row.id))
            details.append(
                EpisodeDetail(
                    pick=pick,
                    result=result,
                    files=_files(folder, store, result),
                    arithmetic=tuple(reward_lines(result, weights)),
                )
            )
    return details


def submitted_files(folder: RunDir, store: RunStore, job_hash: str) -> dict[str, str] | None:
    """Text by path of a submitted bundle; None when it was not kept or is damaged."""
    job = store.jobs.with_payload("job_hash", job_hash)
    artifact = job.payload.get("bundle") if job is not None else None
    if not isinstance(artifact, str):
        return None
    try:
        bundle = unpack_bundle(folder.artifacts, artifact)
    except (JobFailedError, JobRejectedError, ValueError):
        return None
    return {path: data.decode("utf-8", "replace") for path, data in bundle.files.items()}


def _best_median_worst(played: Sequence[EpisodeRow]) -> list[Pick]:
    ordered = [row for _, row in sorted(enumerate(played), key=lambda one: (one[1].reward, one[0]))]
    chosen: dict[str, list[Place]] = {}
    places: tuple[tuple[Place, int], ...] = (
        ("best", len(ordered) - 1),
        ("median", (len(ordered) - 1) // 2),
        ("worst", 0),
    )
    for place, index in places:
        chosen.setdefault(ordered[index].id, []).append(place)
    by_id = {row.id: row for row in ordered}
    return [Pick(row=by_id[key], places=tuple(found)) for key, found in chosen.items()]


def _files(folder: RunDir, store: RunStore, result: EpisodeResult) -> dict[str, str] | None:
    hashes = [one.job_hash for one in result.attempts if one.job_hash and not one.ok]
    hashes += [one.job_hash for one in result.attempts if one.job_hash and one.ok]
    return submitted_files(folder, store, hashes[-1]) if hashes else None
