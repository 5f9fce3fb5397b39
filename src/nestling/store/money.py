"""Money reserved and spent, in whole micro-dollars, with running totals per scope.

A reservation moves `reserved` up in every scope it belongs to; settling moves it from reserved to
spent. The caps are compared inside the same transaction as the change, so that any number of
threads and processes together never pass one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nestling.core.clock import Clock
from nestling.store.connection import Connection
from nestling.store.events import EventLog

__all__ = ["MoneyRecord", "MoneyTable", "MoneyTotal", "Refusal", "Reservation", "Spending"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Money to set aside for one dispatch."""

    id: str
    microusd: int
    machine: str
    day: str
    """UTC date, `2031-01-31`."""
    episode_id: str | None = None
    job_id: str | None = None
    family: str | None = None

    def scopes(self) -> Sequence[str]:
        """Every total this counts towards."""
        return _scopes(self.day, self.episode_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoneyTotal:
    """Money of one scope."""

    reserved_microusd: int
    spent_microusd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a reservation was not made."""

    scope: str
    cap_microusd: int
    used_microusd: int
    """Reserved and spent so far in that scope."""
    asked_microusd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoneyRecord:
    """One dispatch's money."""

    id: str
    episode_id: str | None
    job_id: str | None
    family: str | None
    machine: str
    day: str
    state: str
    reserved_microusd: int
    spent_microusd: int
    seconds: float
    reserved_at: float
    settled_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """What was settled for one kind of job of one family on one machine type."""

    machine: str
    family: str
    """Empty: work of no family."""
    kind: str
    """check, run or baseline; empty: of no job."""
    tries: int
    seconds: float
    """Of workers; those that died without a word count 0 here and in full in `usd`."""
    usd: float
    predicted_s: float
    """Of those tries whose job had a prediction, and what they took."""
    predicted_took_s: float


class MoneyTable:
    """Reservations and totals."""

    def __init__(self, connection: Connection, events: EventLog, clock: Clock) -> None:
        self._connection = connection
        self._events = events
        self._clock = clock

    def reserve(
        self,
        reservation: Reservation,
        caps_microusd: Mapping[str, int],
        *,
        elsewhere: Callable[[], Refusal | None] = lambda: None,
    ) -> Refusal | None:
        """Set money aside unless a scope would pass its cap; None when it was set aside.

        `elsewhere` is asked last, once every cap here has room: a cap that is kept in another
        file. Reserving the same id again changes nothing and asks nobody.
        """
        with self._connection.joined():
            if self._connection.one("SELECT 1 FROM money WHERE id = ?", (reservation.id,)):
                return None
            refusal = self._first_refusal(reservation, caps_microusd) or elsewhere()
            if refusal is not None:
                self._events.append(
                    "money.refused",
                    reservation.id,
                    {"scope": refusal.scope, "asked_microusd": reservation.microusd},
                )
                return refusal
            self._insert(reservation)
            for scope in reservation.scopes():
                self._connection.execute(
                    "INSERT INTO money_totals (scope, reserved_microusd, spent_microusd) "
                    "VALUES (?1, ?2, 0) ON CONFLICT DO UPDATE SET "
                    "reserved_microusd = reserved_microusd + ?2",
                    (scope, reservation.microusd),
                )
            self._events.append(
                "money.reserved", reservation.id, {"microusd": reservation.microusd}
            )
        return None

    def settle(self, reservation_id: str, spent_microusd: int, seconds: float) -> int:
        """Turn a reservation into what was really spent; returns the overrun (0 when within it).

        An unknown or already settled id changes nothing.
        """
        with self._connection.joined():
            row = self._connection.one(
                "SELECT * FROM money WHERE id = ? AND state = 'reserved'", (reservation_id,)
            )
            if row is None:
                return 0
            reserved = int(row["reserved_microusd"])
            self._connection.execute(
                "UPDATE money SET state = 'settled', spent_microusd = ?, seconds = ?, "
                "settled_at = ? WHERE id = ?",
                (spent_microusd, seconds, self._clock.now(), reservation_id),
            )
            for scope in _scopes(row["day"], row["episode_id"]):
                self._connection.execute(
                    "UPDATE money_totals SET reserved_microusd = reserved_microusd - ?, "
                    "spent_microusd = spent_microusd + ? WHERE scope = ?",
                    (reserved, spent_microusd, scope),
                )
            overrun = max(0, spent_microusd - reserved)
            self._events.append(
                "money.overrun" if overrun else "money.settled",
                reservation_id,
                {"spent_microusd": spent_microusd, "reserved_microusd": reserved},
            )
        return overrun

    def total(self, scope: str = "run") -> MoneyTotal:
        """Money of `run`, `day:<date>` or `episode:<id>`."""
        row = self._connection.one(
            "SELECT reserved_microusd, spent_microusd FROM money_totals WHERE scope = ?", (scope,)
        )
        if row is None:
            return MoneyTotal(reserved_microusd=0, spent_microusd=0)
        return MoneyTotal(**dict(row))

    def all(self) -> list[MoneyRecord]:
        """Every reservation, oldest first."""
        rows = self._connection.all("SELECT * FROM money ORDER BY reserved_at, id")
        return [MoneyRecord(**dict(row)) for row in rows]

    def get(self, reservation_id: str) -> MoneyRecord | None:
        """One reservation; None when it was never made here."""
        row = self._connection.one("SELECT * FROM money WHERE id = ?", (reservation_id,))
        return None if row is None else MoneyRecord(**dict(row))

    def open_of(self, job_id: str) -> list[MoneyRecord]:
        """Reservations of a job that are not settled."""
        rows = self._connection.all(
            "SELECT * FROM money WHERE job_id = ? AND state = 'reserved' ORDER BY id", (job_id,)
        )
        return [MoneyRecord(**dict(row)) for row in rows]

    def spent_by(self, column: str) -> dict[str, tuple[int, float]]:
        """Micro-dollars and seconds by `machine` or `family`."""
        if column not in ("machine", "family", "day"):
            raise ValueError(f"money is not kept by {column!r}; expected machine, family or day")
        rows = self._connection.all(
            f"SELECT ifnull({column}, ''), sum(spent_microusd), sum(seconds) FROM money "  # noqa: S608 (checked above)
            f"GROUP BY {column}"
        )
        return {str(row[0]): (int(row[1]), float(row[2])) for row in rows}

    def spending(self) -> list[Spending]:
        """Everything settled, in the order of machine, family and kind."""
        rows = self._connection.all(
            "SELECT money.machine AS machine, ifnull(money.family, '') AS family, "
            "ifnull(jobs.kind, '') AS kind, count(*) AS tries, sum(money.seconds) AS seconds, "
            "sum(money.spent_microusd) / 1e6 AS usd, ifnull(sum(jobs.predicted_s), 0.0) AS "
            "predicted_s, total(CASE WHEN jobs.predicted_s > 0 THEN money.seconds END) AS "
            "predicted_took_s FROM money LEFT JOIN jobs ON jobs.id = money.job_id "
            "WHERE money.state = 'settled' GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
        )
        return [Spending(**dict(row)) for row in rows]

    def _first_refusal(
        self, reservation: Reservation, caps_microusd: Mapping[str, int]
    ) -> Refusal | None:
        for scope in reservation.scopes():
            refusal = self._refusal(scope, caps_microusd.get(scope), reservation.microusd)
            if refusal is not None:
                return refusal
        return None

    def _refusal(self, scope: str, cap: int | None, asked: int) -> Refusal | None:
        if cap is None:
            return None
        total = self.total(scope)
        used = total.reserved_microusd + total.spent_microusd
        if used + asked <= cap:
            return None
        return Refusal(scope=scope, cap_microusd=cap, used_microusd=used, asked_microusd=asked)

    def _insert(self, reservation: Reservation) -> None:
        self._connection.execute(
            "INSERT INTO money (id, episode_id, job_id, family, machine, day, state, "
            "reserved_microusd, reserved_at) VALUES (?, ?, ?, ?, ?, ?, 'reserved', ?, ?)",
            (
                reservation.id,
                reservation.episode_id,
                reservation.job_id,
                reservation.family,
                reservation.machine,
                reservation.day,
                reservation.microusd,
                self._clock.now(),
            ),
        )


def _scopes(day: str, episode_id: str | None) -> Sequence[str]:
    scopes = ["run", f"day:{day}"]
    return scopes if episode_id is None else [*scopes, f"episode:{episode_id}"]
