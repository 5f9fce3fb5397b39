"""A run as a few small files that can be kept in a repository, and read back without its store.

`run.json` holds the run as a whole; one line of JSON each, compressed: `steps.jsonl.gz`,
`sweeps.jsonl.gz`, `episodes.jsonl.gz` (choices, scores and reward terms of every finished episode,
those of sweeps included) and `jobs.jsonl.gz`. Texts, tokens, weights and submitted files stay
behind.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from nestling.core.errors import StoreError
from nestling.core.frozen import Frozen
from nestling.core.rundir import write_atomic
from nestling.outer.step_report import StepReport
from nestling.outer.sweep_report import Sweep
from nestling.report.run_data import EpisodeRow, JobRow
from nestling.report.run_records import RunRecords

__all__ = ["is_arc_data", "read_arc_data", "write_arc_data"]

_HEAD: Final = "run.json"
_STEPS, _SWEEPS = "steps.jsonl.gz", "sweeps.jsonl.gz"
_EPISODES, _JOBS = "episodes.jsonl.gz", "jobs.jsonl.gz"

_Row = TypeVar("_Row")


class _SweepLine(Frozen):
    step: int
    sweep: Sweep


_FORMAT: Final = 1
_RECORDS = TypeAdapter(RunRecords)
_APART: Final = frozenset({"steps", "sweeps", "episodes", "jobs"})
"""Fields with a file of their own; all others are in `run.json`."""
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
    head = _RECORDS.dump_python(records, mode="json", exclude=set(_APART))
    swept = [_SweepLine(step=step, sweep=one) for step, one in sorted(records.sweeps.items())]
    files = {
        _STEPS: _lines(_STEP_ROWS, records.steps),
        _SWEEPS: _lines(_SWEEP_ROWS, swept),
        _EPISODES: _lines(_EPISODE_ROWS, records.episodes),
        _JOBS: _lines(_JOB_ROWS, records.jobs),
        # Last, because a folder counts as an export once it is there.
        _HEAD: json.dumps({"format": _FORMAT, **head}, indent=2).encode() + b"\n",
    }
    for name, content in files.items():
        write_atomic(folder / name, content)
    return [folder / name for name in files]


def read_arc_data(folder: Path) -> RunRecords:
    """The records that were written; raises `StoreError` for a missing or damaged file."""
    head = _head(folder / _HEAD)
    swept = _rows(_SWEEP_ROWS, folder / _SWEEPS)
    apart = {
        "steps": _rows(_STEP_ROWS, folder / _STEPS),
        "sweeps": {one.step: one.sweep for one in swept},
        "episodes": _rows(_EPISODE_ROWS, folder / _EPISODES),
        "jobs": _rows(_JOB_ROWS, folder / _JOBS),
    }
    try:
        return _RECORDS.validate_python({**head, **apart})
    except ValidationError as error:
        raise _unreadable(folder / _HEAD, error) from error


def _lines(adapter: TypeAdapter[_Row], rows: Iterable[_Row]) -> bytes:
    return gzip.compress(b"".join(adapter.dump_json(row) + b"\n" for row in rows), mtime=0)


def _head(path: Path) -> dict[str, Any]:
    """What `run.json` holds beside its format."""
    try:
        head = json.loads(path.read_bytes())
        found = head.pop("format")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _unreadable(path, error) from error
    if found != _FORMAT:
        raise StoreError(
            f"{path} has format {found}; expected {_FORMAT}; use the version that wrote it"
        )
    assert isinstance(head, dict)
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
