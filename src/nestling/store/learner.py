"""Which agent weights exist: the outer loop's published versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from sqlite3 import Row
from typing import Any

from nestling.core.clock import Clock
from nestling.store.connection import Connection
from nestling.store.events import EventLog

__all__ = ["LearnerVersion", "LearnerVersions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerVersion:
    """One set of agent weights."""

    version: int
    """0 is the untrained agent."""
    step: int
    """Outer steps taken to get it."""
    handle: str
    """What the learner samples from it by."""
    state_ref: str | None
    """Where weights, optimiser and random state are, for `load`."""
    content_hash: str | None
    state: dict[str, Any]
    """Small facts needed to resume, JSON."""
    published_at: float


class LearnerVersions:
    """Append-only, by version."""

    def __init__(self, connection: Connection, events: EventLog, clock: Clock) -> None:
        self._connection = connection
        self._events = events
        self._clock = clock

    def publish(
        self,
        version: int,
        *,
        step: int,
        handle: str,
        state_ref: str | None = None,
        content_hash: str | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a version; one that a crashed step had published already is replaced."""
        with self._connection.transaction():
            self._connection.execute(
                "INSERT OR REPLACE INTO learner_versions (version, step, handle, state_ref, "
                "content_hash, state, published_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    version,
                    step,
                    handle,
                    state_ref,
                    content_hash,
                    json.dumps(state or {}, allow_nan=False),
                    self._clock.now(),
                ),
            )
            self._events.append("learner.published", str(version), {"step": step})

    def get(self, version: int) -> LearnerVersion | None:
        """One version."""
        row = self._connection.one("SELECT * FROM learner_versions WHERE version = ?", (version,))
        return None if row is None else _version(row)

    def all(self) -> list[LearnerVersion]:
        """Every version, oldest first."""
        rows = self._connection.all("SELECT * FROM learner_versions ORDER BY version")
        return [_version(row) for row in rows]


def _version(row: Row) -> LearnerVersion:
    fields = dict(row)
    fields["state"] = json.loads(fields["state"])
    return LearnerVersion(**fields)
