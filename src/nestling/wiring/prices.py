"""What a worker of the recipe costs."""

from __future__ import annotations

from nestling.config import LocalFleet, RayFleet, RunConfig
from nestling.fleet.budget import Price, load_prices

__all__ = ["worker_prices"]


def worker_prices(config: RunConfig) -> dict[str, Price]:
    """Price of one worker by machine type; workers that share a machine share its price."""
    prices = load_prices()
    fleet = config.fleet
    if isinstance(fleet, LocalFleet | RayFleet) and fleet.machine in prices:
        price = prices[fleet.machine]
        share = price.usd_per_hour / fleet.workers_per_machine
        prices[fleet.machine] = price.model_copy(update={"usd_per_hour": share})
    return prices
