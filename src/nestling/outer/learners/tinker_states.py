"""What the run folder keeps of states that live on the service: one small JSON file each.

`<name>.json` names the checkpoints of a saved state, `usage.json` what was spent, calls under way at
their most. No secrets.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from pydantic import Field, ValidationError

from nestling.core.errors import LearnerError
from nestling.core.frozen import Frozen
from nestling.core.rundir import write_atomic
from nestling.outer.learners.tinker_prices import Usage

__all__ = ["SavedState", "StateFolder"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_USAGE = "usage.json"


class SavedState(Frozen):
    """One saved learner."""

    version: int = Field(ge=0)
    """Updates in the weights."""
    base_model: str
    lora_rank: int
    seed: int
    state_path: str | None
    """Weights and optimiser on the service; None: the untrained adapter, made again from its seed."""
    sampler_path: str | None
    """Weights to sample; None: the base model."""
    order: int = Field(ge=0)
    """Counts saves."""
    deleted: bool = False
    """The optimiser was deleted to save storage: it can be sampled, not resumed."""


class StateFolder:
    """The files of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, state: SavedState) -> None:
        """All or nothing; raises `LearnerError`."""
        if not _NAME.fullmatch(name) or f"{name}.json" == _USAGE:
            raise LearnerError(
                f"{name!r} cannot name a saved state; use letters, digits, . _ and -"
            )
        self._put(self._folder / f"{name}.json", state.model_dump_json(indent=2))

    def read(self, name: str) -> SavedState:
        """Raises `LearnerError`."""
        path = self._folder / f"{name}.json"
        try:
            return SavedState.model_validate(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, ValidationError) as error:
            raise LearnerError(
                f"{path} is not a saved learner: {error}; expected a name that `save` returned"
            ) from error

    def all(self) -> list[tuple[str, SavedState]]:
        """Every saved state, oldest first."""
        names = [path.stem for path in self._folder.glob("*.json") if path.name != _USAGE]
        return sorted(((name, self.read(name)) for name in names), key=lambda one: one[1].order)

    def write_usage(self, usage: Usage) -> None:
        """Remember what was spent; on disk when it returns."""
        self._put(self._folder / _USAGE, usage.model_dump_json())

    def read_usage(self) -> Usage:
        """What was spent when it was last written; nothing for a new run."""
        path = self._folder / _USAGE
        try:
            return Usage.model_validate_json(path.read_bytes()) if path.exists() else Usage()
        except (OSError, ValueError) as error:
            raise LearnerError(
                f"{path} cannot be read: {error}; expected token counts; repair it, or delete it to "
                "count from 0"
            ) from error

    def _put(self, path: Path, text: str) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text.encode() + b"\n")
        except OSError as error:
            raise LearnerError(
                f"{path} cannot be written: {error}; free disk space, resume"
            ) from error
