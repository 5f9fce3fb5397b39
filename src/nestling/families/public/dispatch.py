"""dispatch: weigh each order, choose a vehicle by the rule in the prompt, close for a code."""

from __future__ import annotations

import random
from typing import Any

from .item import Item
from .steps import BAD_CALL, LABELS, LAST_LABEL, Signatures, check_code, draw_difficulty, read_call

__all__ = [
    "HIGHEST",
    "SIGNATURES",
    "SYSTEM_PROMPT",
    "VEHICLES",
    "call",
    "choose",
    "sample",
    "start",
]

SYSTEM_PROMPT = "tools: weigh route close"
HIGHEST = 6
"""Most orders of an item."""
SIGNATURES: Signatures = {
    "weigh": {"order": int},
    "route": {"order": int, "vehicle": str},
    "close": {},
}
VEHICLES = ("truck", "van", "bike")


def sample(rng: random.Random, lo: int, hi: int) -> Item:
    """An item of lo to hi orders (within 1..6); the answer is the code that `close` gives.

    The code depends on which orders were weighed and where each was routed.
    """
    num_orders = draw_difficulty(rng, lo, hi, HIGHEST)
    truck_over, van_over = rng.randint(50, 80), rng.randint(15, 45)
    orders = rng.sample(range(10, 100), num_orders)
    world: dict[str, Any] = {
        "truck_over": truck_over,
        "van_over": van_over,
        "weights": {str(order): rng.randint(2, 99) for order in orders},
    }
    state = start(world)
    for order in orders:
        call(world, state, "weigh", {"order": order})
        call(world, state, "route", {"order": order, "vehicle": choose(world, order)})
    listed = " ".join(
        f"{label} order {order}." for label, order in zip(LABELS, orders, strict=False)
    )
    return Item(
        prompt=f"rule: over {truck_over} truck, over {van_over} van, else bike. "
        f"{listed} {LAST_LABEL} close.",
        system_prompt=SYSTEM_PROMPT,
        answer=call(world, state, "close", {}),
        num_calls=2 * num_orders + 1,
        world=world,
    )


def choose(world: dict[str, Any], order: int) -> str:
    """The vehicle that the rule asks for."""
    weight = world["weights"][str(order)]
    if weight > world["truck_over"]:
        return "truck"
    return "van" if weight > world["van_over"] else "bike"


def start(world: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG001 (every family has the same form)
    """`weighed`: orders weighed so far, sorted; `routes`: order (as text) to vehicle."""
    return {"weighed": [], "routes": {}}


def call(world: dict[str, Any], state: dict[str, Any], name: str, arguments: dict[str, Any]) -> str:
    """A weight, `ok`, the closing code, or an error; changes `state`."""
    values = read_call(SIGNATURES, name, arguments)
    if values is None:
        return BAD_CALL
    if name == "close":
        return check_code(state["weighed"], sorted(state["routes"].items()))
    order = values[0]
    weight = world["weights"].get(str(order))
    if weight is None:
        return BAD_CALL
    if name == "weigh":
        if order not in state["weighed"]:
            state["weighed"].append(order)
            state["weighed"].sort()
        return str(weight)
    if values[1] not in VEHICLES:
        return BAD_CALL
    state["routes"][str(order)] = values[1]
    return "ok"
