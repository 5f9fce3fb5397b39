"""dispatch, the trusted half: solution, plausible errors, vocabulary."""

from __future__ import annotations

import random
from typing import Any, Final

from nestling.families.family import Item, RuledFamily, Solution, call_pieces
from nestling.families.public import dispatch as rules
from nestling.families.public.steps import LABELS, LAST_LABEL

__all__ = ["DISPATCH", "Dispatch"]


class Dispatch(RuledFamily):
    """Conditional routing by weight."""

    name = "dispatch"
    rules = rules
    spec = (
        "Teach a small model to dispatch orders. It must weigh each order, route it by the rule in "
        "the prompt (over the first limit truck, over the second van, else bike), then close and "
        "state the code. The code depends on what was weighed and where each order went."
    )
    eval_range = (1, 3)
    held_out = False
    vocabulary = (
        rules.SYSTEM_PROMPT,
        "rule: over ",
        ", over ",
        ", else ",
        *rules.VEHICLES,
        " order ",
        " close.",
        *call_pieces(rules),
    )

    def solve(self, item: Item) -> Solution:
        """Weigh and route each order, then close."""
        limits = item.world["truck_over"], item.world["van_over"]
        for label, text in zip(LABELS, item.world["weights"], strict=False):
            order = int(text)
            weight = yield label, "weigh", {"order": order}
            vehicle = _by_rule(limits, weight) if weight and weight.isdigit() else "van"
            yield label, "route", {"order": order, "vehicle": vehicle}
        return (yield LAST_LABEL, "close", {}) or "10"

    def corrupt(
        self, item: Item, rng: random.Random, name: str, arguments: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Another vehicle, another order, or a late change of mind instead of closing."""
        orders = [int(text) for text in item.world["weights"]]
        if name == "route":
            vehicles = [other for other in rules.VEHICLES if other != arguments["vehicle"]]
            return name, {**arguments, "vehicle": rng.choice(vehicles)}
        if name == "weigh":
            others = [order for order in orders if order != arguments["order"]]
            return name, {"order": rng.choice(others or [rng.randint(10, 99)])}
        return "route", {"order": rng.choice(orders), "vehicle": rng.choice(rules.VEHICLES)}

    def guess(self, item: Item, rng: random.Random) -> str:  # noqa: ARG002
        """Any code."""
        return str(rng.randint(10, 99))


def _by_rule(limits: tuple[int, int], weight: str) -> str:
    if int(weight) > limits[0]:
        return "truck"
    return "van" if int(weight) > limits[1] else "bike"


DISPATCH: Final = Dispatch()
