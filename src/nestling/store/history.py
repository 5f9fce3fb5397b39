"""How long jobs really took, kept for all runs of a state folder."""

from __future__ import annotations

from dataclasses import dataclass

from nestling.core.clock import Clock
from nestling.store.connection import Connection

__all__ = ["History", "PastJob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastJob:
    """One finished job."""

    family: str
    base: str
    machine: str
    """Machine type in the price table."""
    turns: float
    """Its work: steps x rollouts a step x turns a rollout."""
    bound_s: float
    """Seconds that were computed from its settings before it ran."""
    seconds: float
    """Seconds that it kept its worker."""


class History:
    """Past jobs, newest first."""

    def __init__(self, connection: Connection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock

    def add(self, run: str, job: str, past: PastJob) -> None:
        """Remember a job; the same one again changes nothing."""
        with self._connection.transaction():
            self._connection.execute(
                "INSERT INTO history (run, job, family, base, machine, turns, bound_s, seconds, at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (
                    run,
                    job,
                    past.family,
                    past.base,
                    past.machine,
                    past.turns,
                    past.bound_s,
                    past.seconds,
                    self._clock.now(),
                ),
            )

    def newest(
        self, *, machine: str, base: str | None = None, family: str | None = None, limit: int = 50
    ) -> list[PastJob]:
        """The last jobs of a machine type, of one base and family when they are given."""
        rows = self._connection.all(
            "SELECT family, base, machine, turns, bound_s, seconds FROM history "
            "WHERE machine = ?1 AND (?2 IS NULL OR base = ?2) AND (?3 IS NULL OR family = ?3) "
            "ORDER BY at DESC, run, job LIMIT ?4",
            (machine, base, family, limit),
        )
        return [PastJob(**dict(row)) for row in rows]

    def machines(self) -> list[str]:
        """Machine types that have a past."""
        return [
            str(row[0])
            for row in self._connection.all("SELECT DISTINCT machine FROM history ORDER BY machine")
        ]
