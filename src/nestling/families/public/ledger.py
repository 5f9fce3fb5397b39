"""ledger: move money between accounts in order, then ask for one balance."""

from __future__ import annotations

import random
from typing import Any

from .item import Item
from .steps import BAD_CALL, LABELS, LAST_LABEL, NAMES, Signatures, draw_difficulty, read_call

__all__ = ["HIGHEST", "NO_FUNDS", "SIGNATURES", "SYSTEM_PROMPT", "call", "sample", "start"]

SYSTEM_PROMPT = "tools: deposit withdraw transfer balance"
HIGHEST = 8
"""Most movements of an item."""
SIGNATURES: Signatures = {
    "deposit": {"account": str, "amount": int},
    "withdraw": {"account": str, "amount": int},
    "transfer": {"source": str, "target": str, "amount": int},
    "balance": {"account": str},
}
NO_FUNDS = "error: insufficient funds"

_MAX_AMOUNT = 999


def sample(rng: random.Random, lo: int, hi: int) -> Item:
    """An item of lo to hi movements (within 1..8) over three accounts, then one balance.

    Opening balances are not in the prompt, so the answer has to come from the tools. A movement
    that lacks funds is refused and changes nothing; that is part of the task.
    """
    num_moves = draw_difficulty(rng, lo, hi, HIGHEST)
    accounts = rng.sample(NAMES, 3)
    opening = {account: rng.randint(5, 60) for account in accounts}
    moves = [_draw_move(rng, accounts) for _ in range(num_moves)]
    asked = rng.choice(accounts)
    world: dict[str, Any] = {"opening": opening, "moves": moves, "asked": asked}
    state = start(world)
    for name, arguments in moves:
        call(world, state, name, arguments)
    listed = " ".join(
        f"{label} {_in_words(name, arguments)}."
        for label, (name, arguments) in zip(LABELS, moves, strict=False)
    )
    return Item(
        prompt=f"{listed} {LAST_LABEL} balance of {asked}?",
        system_prompt=SYSTEM_PROMPT,
        answer=str(state["balances"][asked]),
        num_calls=num_moves + 1,
        world=world,
    )


def start(world: dict[str, Any]) -> dict[str, Any]:
    """`balances`: account to money, from the opening balances."""
    return {"balances": dict(world["opening"])}


def call(world: dict[str, Any], state: dict[str, Any], name: str, arguments: dict[str, Any]) -> str:  # noqa: ARG001
    """`ok`, a balance, or an error; changes `state["balances"]`."""
    values = read_call(SIGNATURES, name, arguments)
    if values is None:
        return BAD_CALL
    balances: dict[str, int] = state["balances"]
    accounts, amount = (values, 0) if name == "balance" else (values[:-1], values[-1])
    if any(account not in balances for account in accounts):
        return BAD_CALL
    if name == "balance":
        return str(balances[accounts[0]])
    if not 0 < amount <= _MAX_AMOUNT:
        return BAD_CALL
    if name != "deposit" and balances[accounts[0]] < amount:
        return NO_FUNDS
    balances[accounts[0]] += amount if name == "deposit" else -amount
    if name == "transfer":
        balances[accounts[1]] += amount
    return "ok"


def _draw_move(rng: random.Random, accounts: list[str]) -> list[Any]:
    """A tool name and its arguments, as a list because worlds are JSON."""
    name = rng.choice(("deposit", "withdraw", "transfer"))
    amount = rng.randint(2, 40)
    if name == "transfer":
        source, target = rng.sample(accounts, 2)
        return [name, {"source": source, "target": target, "amount": amount}]
    return [name, {"account": rng.choice(accounts), "amount": amount}]


def _in_words(name: str, arguments: dict[str, Any]) -> str:
    amount = arguments["amount"]
    if name == "transfer":
        return f"transfer {amount} from {arguments['source']} to {arguments['target']}"
    return f"{name} {amount} {'to' if name == 'deposit' else 'from'} {arguments['account']}"
