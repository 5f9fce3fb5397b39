"""What work costs and whether it may be spent.

A dispatch sets aside the most it can cost (its deadline at its machine's price) before it starts,
in the same transaction that compares every cap; afterwards the true cost replaces it. So reserved
plus spent never passes a cap, as long as no job runs past its deadline plus `GRACE_S`; the pool
kills it there.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from pydantic import Field, ValidationError

from nestling.core.clock import Clock
from nestling.core.errors import ConfigError, FleetError
from nestling.core.frozen import Frozen
from nestling.store.money import Refusal, Reservation
from nestling.store.run_store import RunStore

__all__ = ["GRACE_S", "Budget", "BudgetRefusedError", "Caps", "Price", "load_prices"]

GRACE_S = 10.0
"""How long ending a worker that is over its deadline may take."""

_MICRO = 1_000_000


class Price(Frozen):
    """What one machine type costs."""

    usd_per_hour: float = Field(ge=0)
    """For one slot of it."""
    unit: str
    """What one slot is."""
    source: str
    """Where the figure is from."""


class Caps(Frozen):
    """The most that may be reserved and spent together; None is no cap."""

    run_usd: float | None = Field(None, ge=0)
    episode_usd: float | None = Field(None, ge=0)
    day_usd: float | None = Field(None, ge=0)
    """By this run, per UTC day."""


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
    """Prices and caps of one run over its store's money records."""

    def __init__(
        self, store: RunStore, *, clock: Clock, caps: Caps, prices: Mapping[str, Price]
    ) -> None:
        self._store = store
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
        refusal = self._store.money.reserve(reservation, self._caps_of(episode_id))
        if refusal is not None:
            raise BudgetRefusedError(_refusal_text(refusal))
        return usd

    def settle(self, reservation_id: str, *, machine: str, seconds: float) -> float:
        """Replace a reservation by the cost of the time it really took; returns USD."""
        usd = self.cost_usd(machine, seconds)
        self._store.money.settle(reservation_id, _micro_up(usd), seconds)
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
        return len(left)

    def refusal(self, *, machine: str, seconds: float, episode_id: str | None = None) -> str | None:
        """Why that much time would be refused now; None when it would not."""
        asked = _micro_up(self.cost_usd(machine, seconds))
        for scope, cap in self._caps_of(episode_id).items():
            total = self._store.money.total(scope)
            used = total.reserved_microusd + total.spent_microusd
            if used + asked > cap:
                return _refusal_text(
                    Refusal(scope=scope, cap_microusd=cap, used_microusd=used, asked_microusd=asked)
                )
        return None

    def spent_usd(self, scope: str = "run") -> float:
        """Spent so far in `run`, `day:<date>` or `episode:<id>`."""
        return self._store.money.total(scope).spent_microusd / _MICRO

    def _caps_of(self, episode_id: str | None) -> dict[str, int]:
        caps = {
            "run": self._caps.run_usd,
            f"day:{self._today()}": self._caps.day_usd,
            f"episode:{episode_id}": self._caps.episode_usd if episode_id else None,
        }
        return {scope: math.floor(cap * _MICRO) for scope, cap in caps.items() if cap is not None}

    def _today(self) -> str:
        return datetime.fromtimestamp(self._clock.now(), UTC).date().isoformat()


def _micro_up(usd: float) -> int:
    """Whole micro-dollars, rounded up: many small jobs must not add up to nothing.

    The tiny allowance keeps 0.1 + 0.2 from costing a micro-dollar more than 0.3.
    """
    return math.ceil(usd * _MICRO - 1e-6)


def _refusal_text(refusal: Refusal) -> str:
    scope = refusal.scope.partition(":")[0]
    return (
        f"the budget of this {scope} would be passed: {refusal.used_microusd / _MICRO:.4f} USD are "
        f"spent or reserved and this asks for {refusal.asked_microusd / _MICRO:.4f} USD; expected at "
        f"most {refusal.cap_microusd / _MICRO:.4f} USD together; raise {scope}_usd, or ask for less"
    )
