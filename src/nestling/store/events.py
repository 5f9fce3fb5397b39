"""What happened, in order: the append-only log that every change writes to, and metrics.

An event is written in the transaction of the change it tells of, so the log and the tables never
disagree. `seq` grows by commit order and has no gaps that a reader could miss.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from sqlite3 import Row
from typing import Any

from nestling.core.clock import Clock
from nestling.store.connection import Connection

__all__ = ["Event", "EventLog", "Metric", "Metrics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened."""

    seq: int
    at: float
    """Seconds since the epoch."""
    kind: str
    """`noun.verb`, for example `job.done`."""
    subject: str
    """Id of what changed."""
    data: dict[str, Any]


class EventLog:
    """Append, read from a position, and be told of new ones in this process."""

    def __init__(self, connection: Connection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._listeners: list[Callable[[Event], None]] = []

    def append(self, kind: str, subject: str, data: Mapping[str, Any] | None = None) -> int:
        """Add an event to the current transaction (or to its own); returns its position."""
        if not self._connection.in_transaction:
            with self._connection.transaction():
                return self.append(kind, subject, data)
        at = self._clock.now()
        text = json.dumps(data or {}, separators=(",", ":"), allow_nan=False)
        cursor = self._connection.execute(
            "INSERT INTO events (at, kind, subject, data) VALUES (?, ?, ?, ?)",
            (at, kind, subject, text),
        )
        seq = cursor.lastrowid
        assert seq is not None
        if self._listeners:
            event = Event(seq=seq, at=at, kind=kind, subject=subject, data=dict(data or {}))
            self._connection.after_commit(lambda: self._tell(event))
        return seq

    def since(self, seq: int, limit: int = 1000) -> list[Event]:
        """Events after position `seq`, oldest first."""
        rows = self._connection.all(
            "SELECT * FROM events WHERE seq > ? ORDER BY seq LIMIT ?", (seq, limit)
        )
        return [_event(row) for row in rows]

    def of(self, subject: str) -> list[Event]:
        """Everything that happened to one thing."""
        rows = self._connection.all(
            "SELECT * FROM events WHERE subject = ? ORDER BY seq", (subject,)
        )
        return [_event(row) for row in rows]

    def count(self, kind: str) -> int:
        """How many events of a kind there are; reads the whole log."""
        row = self._connection.one("SELECT count(*) FROM events WHERE kind = ?", (kind,))
        assert row is not None
        return int(row[0])

    def last_seq(self) -> int:
        """Position of the newest event; 0 when there is none."""
        row = self._connection.one("SELECT ifnull(max(seq), 0) FROM events")
        assert row is not None
        return int(row[0])

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with each event of this process once it is on disk; returns the undo.

        It is called in the thread that committed and must be quick.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _tell(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            listener(event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number at one outer step."""

    name: str
    """`area/metric_unit`."""
    step: int
    value: float
    at: float


class Metrics:
    """Numbers over outer steps; a step that is done again after a crash replaces its numbers."""

    def __init__(self, connection: Connection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Keep one value per name and step; finite only."""
        at = self._clock.now()
        with self._connection.transaction():
            self._connection.execute_many(
                "INSERT OR REPLACE INTO metrics (name, step, value, at) VALUES (?, ?, ?, ?)",
                [(name, step, float(value), at) for name, value in values.items()],
            )

    def series(self, name: str) -> list[Metric]:
        """One metric, by step."""
        rows = self._connection.all(
            "SELECT name, step, value, at FROM metrics WHERE name = ? ORDER BY step", (name,)
        )
        return [Metric(**dict(row)) for row in rows]

    def names(self) -> list[str]:
        """Every metric recorded so far."""
        return [
            str(row[0])
            for row in self._connection.all("SELECT DISTINCT name FROM metrics ORDER BY name")
        ]


def _event(row: Row) -> Event:
    return Event(
        seq=row["seq"],
        at=row["at"],
        kind=row["kind"],
        subject=row["subject"],
        data=json.loads(row["data"]),
    )
