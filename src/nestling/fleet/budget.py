"""What work costs and whether it may be spent.

A dispatch sets aside the most it can cost (its deadline at its machine's price) before it starts,
in the same transaction that compares every cap; afterwards the true cost replaces it. So reserved
plus spent never passes a cap, as long as no job runs past its deadline plus `GRACE_S`; the pool
kills it there. A cap per day counts all runs of a state folder, through the account's ledger.
"""

from __future__ import annotations

import logging
import math
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from pydantic import Field, ValidationError

from nestling.core.clock import Clock
from nestling.core.errors import ConfigError, FleetError, StoreError
from nestling.core.frozen import Frozen
from nestling.store.account import Account
from nestling.store.ledger import OpenReservation
from nestling.store.money import Refusal, Reservation
from nestling.store.run_store import RunStore

__all__ = ["GRACE_S", "Budget", "BudgetRefusedError", "Caps", "Price", "load_prices"]

GRACE_S = 10.0
"""How long ending a worker that is over its deadline may take."""

_MICRO = 1_000_000

_log = logging.getLogger(__name__)


class Price(Frozen):
    """What one machine type costs."""

    usd_per_hour: float = Field(ge=0)
    """For one slot of it."""
    unit: str
    """What one slot is."""
    source: str
    """Where the figure is from."""
    gpu: str = ""
    """What the renter's API calls it; empty: cannot be rented by name."""
    community_usd_per_hour: float | None = Field(None, ge=0)
    """On machines of third parties; None: unknown or not offered."""


class Caps(Frozen):
    """The most that may be reserved and spent together; None is no cap."""

    run_usd: float | None = Field(None, ge=0)
    """By all jobs of the run."""
    episode_usd: float | None = Field(None, ge=0)
    """By the jobs of one episode."""
    day_usd: float | None = Field(None, ge=0)
    """By all runs of this state folder, per UTC day."""


class BudgetRefusedError(FleetError):
    """A cap would be passed; nothing was reserved."""


def load_prices(path: Path | None = None) -> dict[str, Price]:
    """Prices by machine type: the shipped table, or another file of the same form."""
    name = "prices.toml" if path is None else str(path)
    try:
        if path is None:
            text = resources.files("nestling.fleet").joinpath("prices.toml").read_text("utf-8")
        else:
            text = path.read_text("utf-8")
        return {key: Price.model_validate(value) for key, value in tomllib.loads(text).items()}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigError(
            f"price table {name}: {error}; expected tables with usd_per_hour, unit and source"
        ) from error


class Budget:
    """Prices and caps of one run over its store's money records.

    Without an `account` the cap per day counts this run alone.
    """

    def __init__(
        self,
        store: RunStore,
        *,
        clock: Clock,
        caps: Caps,
        prices: Mapping[str, Price],
        account: Account | None = None,
    ) -> None:
        self._store = store
        self._ledger = None if account is None else account.ledger
        self._run = str(store.path.resolve())
        self._clock = clock
        self._caps = caps
        self._prices = dict(prices)

    def cost_usd(self, machine: str, seconds: float) -> float:
        """Price of some time on one slot; `ConfigError` for a machine without a price."""
        price = self._prices.get(machine)
        if price is None:
            raise ConfigError(
                f"machine type {machine!r} has no price; expected one of "
                f"{', '.join(sorted(self._prices))}; add it to the price table"
            )
        return price.usd_per_hour * seconds / 3600

    def reserve(
        self,
        reservation_id: str,
        *,
        machine: str,
        seconds: float,
        episode_id: str | None = None,
        job_id: str | None = None,
        family: str | None = None,
    ) -> float:
        """Set aside the cost of `seconds`; returns it in USD. Repeating an id changes nothing.

        Raises `BudgetRefusedError` when a cap would be passed.
        """
        usd = self.cost_usd(machine, seconds)
        reservation = Reservation(
            id=reservation_id,
            microusd=_micro_up(usd),
            machine=machine,
            day=self._today(),
            episode_id=episode_id,
            job_id=job_id,
            family=family,
        )
        refusal = self._store.money.reserve(
            reservation,
            self._caps_of(episode_id),
            elsewhere=lambda: self._reserve_in_ledger(reservation),
        )
        if refusal is not None:
            raise BudgetRefusedError(self._refusal_text(refusal))
        return usd

    def settle(self, reservation_id: str, *, machine: str, seconds: float) -> float:
        """Replace a reservation by the cost of the time it really took; returns USD."""
        usd = self.cost_usd(machine, seconds)
        with self._store.joined():
            self._store.money.settle(reservation_id, _micro_up(usd), seconds)
            self._store.after_commit(lambda: self._settle_in_ledger(reservation_id, _micro_up(usd)))
        return usd

    def recover(self) -> int:
        """Settle at their full amount what an earlier controller left reserved; returns how many.

        How long that work really ran is unknown, and caps must hold, so the most it can have cost
        counts as spent.
        """
        with self._store.transaction():
            left = [record for record in self._store.money.all() if record.state == "reserved"]
            for record in left:
                self._store.money.settle(record.id, record.reserved_microusd, 0.0)
        self._close_ledger()
        return len(left)

    def refusal(self, *, machine: str, seconds: float, episode_id: str | None = None) -> str | None:
        """Why that much time would be refused now; None when it would not."""
        asked = _micro_up(self.cost_usd(machine, seconds))
        if self._ledger is not None:
            refusal = self._ledger.refusal(self._today(), asked, _micro_down(self._caps.day_usd))
            if refusal is not None:
                return self._refusal_text(refusal)
        for scope, cap in self._caps_of(episode_id).items():
            total = self._store.money.total(scope)
            used = total.reserved_microusd + total.spent_microusd
            if used + asked > cap:
                return self._refusal_text(
                    Refusal(scope=scope, cap_microusd=cap, used_microusd=used, asked_microusd=asked)
                )
        return None

    def spent_usd(self, scope: str = "run") -> float:
        """Spent so far in `run`, `day:<date>` or `episode:<id>`."""
        return self._store.money.total(scope).spent_microusd / _MICRO

    def _reserve_in_ledger(self, reservation: Reservation) -> Refusal | None:
        """Inside the run's own transaction.

        Should that fail, the ledger counts too much, never too little, until the run starts again.
        """
        if self._ledger is None:
            return None
        return self._ledger.reserve(
            self._run,
            OpenReservation(id=reservation.id, day=reservation.day, microusd=reservation.microusd),
            _micro_down(self._caps.day_usd),
        )

    def _settle_in_ledger(self, reservation_id: str, spent_microusd: int) -> None:
        """After the run's own change is on disk, for the same reason."""
        if self._ledger is None:
            return
        try:
            self._ledger.settle(self._run, reservation_id, spent_microusd)
        except StoreError as error:
            _log.warning("%s stays reserved for today: %s", reservation_id, error)

    def _close_ledger(self) -> None:
        """Settle what an earlier controller of this run left open: as the run says, else in full."""
        if self._ledger is None:
            return
        for left in self._ledger.open_of(self._run):
            known = self._store.money.get(left.id)
            spent = left.microusd if known is None else known.spent_microusd
            self._ledger.settle(self._run, left.id, spent)

    def _caps_of(self, episode_id: str | None) -> dict[str, int]:
        """Caps that the run's own store keeps, by scope."""
        day_usd = self._caps.day_usd if self._ledger is None else None
        caps = {
            "run": self._caps.run_usd,
            f"day:{self._today()}": day_usd,
            f"episode:{episode_id}": self._caps.episode_usd if episode_id else None,
        }
        return {
            scope: micro for scope, cap in caps.items() if (micro := _micro_down(cap)) is not None
        }

    def _today(self) -> str:
        return datetime.fromtimestamp(self._clock.now(), UTC).date().isoformat()

    def _refusal_text(self, refusal: Refusal) -> str:
        scope, _, which = refusal.scope.partition(":")
        whose = {
            "run": "this run",
            "episode": f"episode {which}",
            "day": f"{'this run' if self._ledger is None else 'all runs'} on {which} (UTC)",
        }[scope]
        return (
            f"the cap {scope}_usd would be passed: {refusal.used_microusd / _MICRO:.4f} USD are "
            f"spent or reserved by {whose} and this asks for "
            f"{refusal.asked_microusd / _MICRO:.4f} USD; expected at most "
            f"{refusal.cap_microusd / _MICRO:.4f} USD together; raise budget.{scope}_usd, or ask "
            f"for less"
        )


def _micro_up(usd: float) -> int:
    """Whole micro-dollars, rounded up: many small jobs must not add up to nothing.

    The tiny allowance keeps 0.1 + 0.2 from costing a micro-dollar more than 0.3.
    """
    return math.ceil(usd * _MICRO - 1e-6)


def _micro_down(cap_usd: float | None) -> int | None:
    return None if cap_usd is None else math.floor(cap_usd * _MICRO)
