"""Money of all runs of a state folder by UTC day, so that a cap per day holds across runs.

A run's own store stays the record of its money. The ledger is told first of what is reserved and
last of what was spent, so that at every moment it counts at least as much as the runs do, whatever
dies in between; a run that starts again settles what it left open here.
"""

from __future__ import annotations

from dataclasses import dataclass

from nestling.store.connection import Connection
from nestling.store.money import MoneyTotal, Refusal

__all__ = ["Ledger", "OpenReservation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReservation:
    """Money that a run has set aside and not settled."""

    id: str
    """Unique in its run."""
    day: str
    microusd: int


class Ledger:
    """Open reservations by run, and what each day adds up to."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def reserve(
        self, run: str, reservation: OpenReservation, cap_microusd: int | None
    ) -> Refusal | None:
        """Set money aside unless the day would pass its cap; None when it was set aside.

        The sum over all runs is compared in the transaction that adds to it, so that any number of
        controllers together never pass the cap. An id that is open already changes nothing.
        """
        asked = reservation.microusd
        with self._connection.transaction():
            if self._open(run, reservation.id) is not None:
                return None
            refusal = self.refusal(reservation.day, asked, cap_microusd)
            if refusal is not None:
                return refusal
            self._connection.execute(
                "INSERT INTO reservations (run, id, day, microusd) VALUES (?, ?, ?, ?)",
                (run, reservation.id, reservation.day, asked),
            )
            self._connection.execute(
                "INSERT INTO days (day, run, reserved_microusd, spent_microusd) "
                "VALUES (?1, ?2, ?3, 0) ON CONFLICT DO UPDATE SET "
                "reserved_microusd = reserved_microusd + ?3",
                (reservation.day, run, asked),
            )
        return None

    def settle(self, run: str, reservation_id: str, spent_microusd: int) -> None:
        """Turn a reservation into what was really spent; one that is not open changes nothing."""
        with self._connection.transaction():
            left = self._open(run, reservation_id)
            if left is None:
                return
            self._connection.execute(
                "DELETE FROM reservations WHERE run = ? AND id = ?", (run, reservation_id)
            )
            self._connection.execute(
                "UPDATE days SET reserved_microusd = reserved_microusd - ?, "
                "spent_microusd = spent_microusd + ? WHERE day = ? AND run = ?",
                (left.microusd, spent_microusd, left.day, run),
            )

    def open_of(self, run: str) -> list[OpenReservation]:
        """What a run has set aside and not settled."""
        rows = self._connection.all(
            "SELECT id, day, microusd FROM reservations WHERE run = ? ORDER BY id", (run,)
        )
        return [OpenReservation(**dict(row)) for row in rows]

    def total(self, day: str, run: str | None = None) -> MoneyTotal:
        """Money of a day, over all runs or of one."""
        row = self._connection.one(
            "SELECT ifnull(sum(reserved_microusd), 0) AS reserved_microusd, "
            "ifnull(sum(spent_microusd), 0) AS spent_microusd FROM days "
            "WHERE day = ?1 AND (?2 IS NULL OR run = ?2)",
            (day, run),
        )
        assert row is not None
        return MoneyTotal(**dict(row))

    def refusal(self, day: str, asked_microusd: int, cap_microusd: int | None) -> Refusal | None:
        """Why so much would be refused now; None when it would not."""
        if cap_microusd is None:
            return None
        total = self.total(day)
        used = total.reserved_microusd + total.spent_microusd
        if used + asked_microusd <= cap_microusd:
            return None
        return Refusal(
            scope=f"day:{day}",
            cap_microusd=cap_microusd,
            used_microusd=used,
            asked_microusd=asked_microusd,
        )

    def _open(self, run: str, reservation_id: str) -> OpenReservation | None:
        row = self._connection.one(
            "SELECT id, day, microusd FROM reservations WHERE run = ? AND id = ?",
            (run, reservation_id),
        )
        return None if row is None else OpenReservation(**dict(row))
