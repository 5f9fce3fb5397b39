"""Worker processes that this run started, so that a later controller can find leftovers."""

from __future__ import annotations

from dataclasses import dataclass

from nestling.core.clock import Clock
from nestling.store.connection import Connection
from nestling.store.events import EventLog

__all__ = ["ProcessRecord", "Processes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """One process, told from a later one with the same number by its start time and boot."""

    name: str
    pid: int
    start_ticks: int
    """Start time in clock ticks since boot, from /proc."""
    boot_id: str
    launched_at: float


class Processes:
    """Processes that are thought to run."""

    def __init__(self, connection: Connection, events: EventLog, clock: Clock) -> None:
        self._connection = connection
        self._events = events
        self._clock = clock

    def add(self, name: str, *, pid: int, start_ticks: int, boot_id: str) -> None:
        """Record a process right after it was started."""
        with self._connection.transaction():
            self._connection.execute(
                "INSERT OR REPLACE INTO processes (name, pid, start_ticks, boot_id, launched_at) "
                "VALUES (?, ?, ?, ?, ?)",
                (name, pid, start_ticks, boot_id, self._clock.now()),
            )
            self._events.append("worker.launched", name, {"pid": pid})

    def remove(self, name: str, why: str) -> None:
        """Forget a process once its whole tree is gone."""
        with self._connection.transaction():
            cursor = self._connection.execute("DELETE FROM processes WHERE name = ?", (name,))
            if cursor.rowcount == 1:
                self._events.append("worker.gone", name, {"why": why})

    def all(self) -> list[ProcessRecord]:
        """Every process on record."""
        return [
            ProcessRecord(**dict(row))
            for row in self._connection.all("SELECT * FROM processes ORDER BY launched_at, name")
        ]
