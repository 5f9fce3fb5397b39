"""ledger, the trusted half: solution, plausible errors, vocabulary."""

from __future__ import annotations

import random
from typing import Any, Final

from nestling.families.family import Item, RuledFamily, Solution, call_pieces
from nestling.families.public import ledger as rules
from nestling.families.public.steps import LABELS, LAST_LABEL

__all__ = ["LEDGER", "Ledger"]


class Ledger(RuledFamily):
    """Stateful accounts through tools."""

    name = "ledger"
    rules = rules
    spec = (
        "Teach a small model to keep accounts through tools. It must make the deposits, withdrawals "
        "and transfers of the prompt in order (some are refused for lack of funds; that is right), "
        "then ask for one balance and state it. Opening balances are known to the tools alone."
    )
    eval_range = (2, 5)
    held_out = False
    vocabulary = (
        rules.SYSTEM_PROMPT,
        *(f" {name} " for name in ("deposit", "withdraw", "transfer")),
        " from ",
        " to ",
        " balance of ",
        rules.NO_FUNDS,
        *call_pieces(rules),
    )

    def solve(self, item: Item) -> Solution:
        """The movements in order, then the balance."""
        for label, (name, arguments) in zip(LABELS, item.world["moves"], strict=False):
            yield label, name, dict(arguments)
        return (yield LAST_LABEL, "balance", {"account": item.world["asked"]}) or "10"

    def corrupt(
        self, item: Item, rng: random.Random, name: str, arguments: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Another account of the item."""
        key = rng.choice([key for key in arguments if key != "amount"])
        others = [account for account in item.world["opening"] if account != arguments[key]]
        return name, {**arguments, key: rng.choice(others)}

    def guess(self, item: Item, rng: random.Random) -> str:  # noqa: ARG002
        """A balance of the usual size."""
        return str(rng.randint(1, 90))


LEDGER: Final = Ledger()
