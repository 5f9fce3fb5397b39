"""How far the outer loop has come: steps, and the groups of episodes that feed them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from sqlite3 import Row
from typing import Any, Literal

from nestling.core.clock import Clock
from nestling.store.connection import Connection
from nestling.store.events import EventLog

__all__ = ["GroupRecord", "GroupState", "Progress", "StepSummary"]

GroupState = Literal["open", "complete", "used", "dropped"]
"""open: episodes still run; complete: all are over; used: a step learned from it; dropped: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One outer step."""

    step: int
    state: Literal["running", "done"]
    started_at: float
    finished_at: float | None
    learner_version: int | None
    """Version that came out of the step."""
    summary: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """Episodes of the same task, compared with one another."""

    id: str
    purpose: str
    """train or measure."""
    step: int
    """Outer step it was started in."""
    family: str
    seed: int
    size: int
    learner_version: int | None
    """Version its episodes were started with."""
    state: GroupState
    used_in_step: int | None
    created_at: float


class Progress:
    """Steps and groups."""

    def __init__(self, connection: Connection, events: EventLog, clock: Clock) -> None:
        self._connection = connection
        self._events = events
        self._clock = clock

    def start_step(self, step: int) -> None:
        """Begin a step; a step that a crash cut short begins again, a done one stays done."""
        with self._connection.transaction():
            cursor = self._connection.execute(
                "INSERT INTO steps (step, state, started_at) VALUES (?, 'running', ?) "
                "ON CONFLICT DO NOTHING",
                (step, self._clock.now()),
            )
            if cursor.rowcount == 1:
                self._events.append("step.started", str(step))

    def finish_step(
        self, step: int, *, learner_version: int | None, summary: Mapping[str, Any]
    ) -> None:
        """End a step, with its numbers."""
        with self._connection.transaction():
            self._connection.execute(
                "UPDATE steps SET state = 'done', finished_at = ?, learner_version = ?, "
                "summary = ? WHERE step = ?",
                (
                    self._clock.now(),
                    learner_version,
                    json.dumps(summary, allow_nan=False),
                    step,
                ),
            )
            self._events.append("step.done", str(step), {"learner_version": learner_version})

    def steps(self) -> list[StepSummary]:
        """Every step so far, oldest first."""
        return [_step(row) for row in self._connection.all("SELECT * FROM steps ORDER BY step")]

    def num_done_steps(self) -> int:
        """Steps that are done: where a resumed run goes on."""
        row = self._connection.one("SELECT count(*) FROM steps WHERE state = 'done'")
        assert row is not None
        return int(row[0])

    def open_group(
        self,
        group_id: str,
        *,
        purpose: str,
        step: int,
        family: str,
        seed: int,
        size: int,
        learner_version: int | None,
    ) -> None:
        """Record a group before its first episode; recording it again changes nothing."""
        with self._connection.transaction():
            cursor = self._connection.execute(
                "INSERT INTO groups (id, purpose, step, family, seed, size, learner_version, "
                "state, created_at) VALUES (?, ?, ?, ?, ?, ?, ?, 'open', ?) "
                "ON CONFLICT DO NOTHING",
                (group_id, purpose, step, family, seed, size, learner_version, self._clock.now()),
            )
            if cursor.rowcount == 1:
                self._events.append("group.open", group_id, {"family": family, "step": step})

    def mark_group(self, group_id: str, state: GroupState, used_in_step: int | None = None) -> None:
        """Move a group to a state; repeating it changes nothing."""
        with self._connection.transaction():
            cursor = self._connection.execute(
                "UPDATE groups SET state = ?1, used_in_step = ifnull(?2, used_in_step) "
                "WHERE id = ?3 AND state <> ?1",
                (state, used_in_step, group_id),
            )
            if cursor.rowcount == 1:
                self._events.append(f"group.{state}", group_id, {"used_in_step": used_in_step})

    def group(self, group_id: str) -> GroupRecord | None:
        """One group."""
        row = self._connection.one("SELECT * FROM groups WHERE id = ?", (group_id,))
        return None if row is None else GroupRecord(**dict(row))

    def groups(
        self,
        *,
        purpose: str | None = None,
        step: int | None = None,
        state: GroupState | None = None,
    ) -> list[GroupRecord]:
        """Groups in the order they were opened."""
        rows = self._connection.all(
            "SELECT * FROM groups WHERE (?1 IS NULL OR purpose = ?1) AND (?2 IS NULL OR step = ?2) "
            "AND (?3 IS NULL OR state = ?3) ORDER BY rowid",
            (purpose, step, state),
        )
        return [GroupRecord(**dict(row)) for row in rows]


def _step(row: Row) -> StepSummary:
    fields = dict(row)
    fields["summary"] = json.loads(fields["summary"])
    return StepSummary(**fields)
