"""Worked examples in a job's own data: rows whose data says what the model's turns would be.

A row is a worked example when its data has `turns`, a list of texts: tool calls as `render_call` writes them and, last,
the answer. What tools reply is not part of it: the example is played against the job's own tools.
"""

from __future__ import annotations

import json
from typing import Any, Final

from nestling.jobs.rollout_env import Row

__all__ = ["MAX_TURNS", "MAX_TURN_CHARS", "MAX_WORKED_ROWS", "turns_of"]

MAX_WORKED_ROWS: Final = 1024
"""Rows of a job that are searched for worked examples, from the first."""

MAX_TURNS: Final = 32
MAX_TURN_CHARS: Final = 2000


def turns_of(row: Row) -> list[str] | None:
    """The turns of a worked example; None for an ordinary row.

    Raises:
        ValueError: there are `turns`, but not 1 to 32 texts of at most 2000 characters.
    """
    data: Any = json.loads(row.data_json)
    turns = data.get("turns") if isinstance(data, dict) else None
    if not turns:  # absent, or the empty default of an optional field
        return None
    if (
        not isinstance(turns, list)
        or len(turns) > MAX_TURNS
        or not all(isinstance(turn, str) and len(turn) <= MAX_TURN_CHARS for turn in turns)
    ):
        raise ValueError(
            f"row {row.index} has turns that are not 1 to {MAX_TURNS} texts of at most "
            f"{MAX_TURN_CHARS} characters"
        )
    return turns
