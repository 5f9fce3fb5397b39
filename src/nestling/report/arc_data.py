"""A run as a few small files that can be kept in a repository, and read back without its store.

`run.json` holds the run as a whole; one line of JSON each, compressed: `steps.jsonl.gz`,
`sweeps.jsonl.gz`, `episodes.jsonl.gz` (choices, scores and reward terms of every finished episode,
those of sweeps included) and `jobs.jsonl.gz`. Texts, tokens, weights and submitted files stay
behind.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from nestling.agent.reward import RewardWeights
from nestling.core.errors import StoreError
from nestling.core.frozen import Frozen
from nestling.core.rundir import write_atomic
from nestling.outer.step_report import StepReport
from nestling.outer.sweep_report import Sweep
from nestling.report.run_data import EpisodeRow, JobRow, MachineCost, RunInfo
from nestling.report.run_records import RunRecords
from nestling.store.money import Spending

__all__ = ["is_arc_data", "read_arc_data", "write_arc_data"]

_HEAD: Final = "run.json"
_STEPS, _SWEEPS = "steps.jsonl.gz", "sweeps.jsonl.gz"
_EPISODES, _JOBS = "episodes.jsonl.gz", "jobs.jsonl.gz"

_Row = TypeVar("_Row")


class _Head(Frozen):
    format: int
    info: RunInfo
    weights: RewardWeights | None
    training_families: tuple[str, ...]
    baselines: dict[str, dict[str, float]]
    running_episodes: int
    failed_episodes: int
    costs: tuple[MachineCost, ...]
    family_costs: tuple[Spending, ...]
    usd: float | None
    usd_reserved: float


class _SweepLine(Frozen):
    step: int
    sweep: Sweep


_FORMAT: Final = 1
_EPISODE_ROWS = TypeAdapter(EpisodeRow)
_JOB_ROWS = TypeAdapter(JobRow)
_STEP_ROWS = TypeAdapter(StepReport)
_SWEEP_ROWS = TypeAdapter(_SweepLine)


def is_arc_data(folder: Path) -> bool:
    """Whether a folder looks like what `write_arc_data` makes."""
    return (folder / _HEAD).is_file()


def write_arc_data(records: RunRecords, folder: Path) -> list[Path]:
    """Write the files, each whole or not at all; equal records give equal bytes.

    Raises `StoreError` when the folder cannot be written.
    """
    head = _Head(
        format=_FORMAT,
        info=records.info,
        weights=records.weights,
        training_families=records.training_families,
        baselines={name: dict(scores) for name, scores in records.baselines.items()},
        running_episodes=records.running_episodes,
        failed_episodes=records.failed_episodes,
        costs=records.costs,
        family_costs=records.family_costs,
        usd=records.usd,
        usd_reserved=records.usd_reserved,
    )
    swept = [_SweepLine(step=step, sweep=one) for step, one in sorted(records.sweeps.items())]
    files = {
        _STEPS: _lines(_STEP_ROWS, records.steps),
        _SWEEPS: _lines(_SWEEP_ROWS, swept),
        _EPISODES: _lines(_EPISODE_ROWS, records.episodes),
        _JOBS: _lines(_JOB_ROWS, records.jobs),
        # Last, because a folder counts as an export once it is there.
        _HEAD: head.model_dump_json(indent=2).encode() + b"\n",
    }
    for name, content in files.items():
        write_atomic(folder / name, content)
    return [folder / name for name in files]


def read_arc_data(folder: Path) -> RunRecords:
    """The records that were written; raises `StoreError` for a missing or damaged file."""
    head = _parse_head(folder / _HEAD)
    swept = _rows(_SWEEP_ROWS, folder / _SWEEPS)
    return RunRecords(
        info=head.info,
        weights=head.weights,
        training_families=head.training_families,
        baselines=head.baselines,
        steps=_rows(_STEP_ROWS, folder / _STEPS),
        sweeps={one.step: one.sweep for one in swept},
        episodes=_rows(_EPISODE_ROWS, folder / _EPISODES),
        jobs=_rows(_JOB_ROWS, folder / _JOBS),
        running_episodes=head.running_episodes,
        failed_episodes=head.failed_episodes,
        costs=head.costs,
        family_costs=head.family_costs,
        usd=head.usd,
        usd_reserved=head.usd_reserved,
    )


def _lines(adapter: TypeAdapter[_Row], rows: Iterable[_Row]) -> bytes:
    return gzip.compress(b"".join(adapter.dump_json(row) + b"\n" for row in rows), mtime=0)


def _parse_head(path: Path) -> _Head:
    try:
        head = _Head.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise _unreadable(path, error) from error
    if head.format != _FORMAT:
        raise StoreError(
            f"{path} has format {head.format}; expected {_FORMAT}; use the version that wrote it"
        )
    return head


def _rows(adapter: TypeAdapter[_Row], path: Path) -> tuple[_Row, ...]:
    try:
        lines: Sequence[bytes] = gzip.decompress(path.read_bytes()).splitlines()
        return tuple(adapter.validate_json(line) for line in lines)
    except (OSError, EOFError, zlib.error, ValidationError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> StoreError:
    return StoreError(
        f"cannot read {path}: {error}; expected a file of `nestling report RUN --export`; "
        f"export the run again or restore the file"
    )
