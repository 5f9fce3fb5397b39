"""multi_hop: follow relations between people, each hop needs the answer of the one before."""

from __future__ import annotations

import random
from typing import Any

from .item import Item
from .steps import BAD_CALL, LABELS, NAMES, Signatures, draw_difficulty, read_call

__all__ = [
    "COLORS",
    "HIGHEST",
    "RELATIONS",
    "SIGNATURES",
    "SYSTEM_PROMPT",
    "call",
    "sample",
    "start",
]

SYSTEM_PROMPT = "tools: lookup"
HIGHEST = 8
"""Most hops of an item."""
SIGNATURES: Signatures = {"lookup": {"person": str, "relation": str}}
RELATIONS = ("boss", "friend", "mentor", "twin")
COLORS = ("red", "blue", "green", "pink", "gray", "gold")


def sample(rng: random.Random, lo: int, hi: int) -> Item:
    """An item of lo to hi hops (within 1..8); half of them end in a person's color.

    The world is drawn anew for each item and can be read through the tool alone.
    """
    num_hops = draw_difficulty(rng, lo, hi, HIGHEST)
    people: dict[str, dict[str, str]] = {}
    for person in NAMES:
        others = [name for name in NAMES if name != person]
        people[person] = {relation: rng.choice(others) for relation in RELATIONS}
        people[person]["color"] = rng.choice(COLORS)
    first = rng.choice(NAMES)
    relations = [rng.choice(RELATIONS) for _ in range(num_hops)]
    if rng.random() < 0.5:
        relations[-1] = "color"
    value = first
    for relation in relations:
        value = people[value][relation]
    hops = [f"{label} {relation} of" for label, relation in zip(LABELS, relations, strict=False)]
    return Item(
        prompt=f"who is {' '.join(reversed(hops))} {first}?",
        system_prompt=SYSTEM_PROMPT,
        answer=value,
        num_calls=num_hops,
        world={"people": people, "first": first, "relations": relations},
    )


def start(world: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG001 (every family has the same form)
    """No state: looking up changes nothing."""
    return {}


def call(world: dict[str, Any], state: dict[str, Any], name: str, arguments: dict[str, Any]) -> str:  # noqa: ARG001
    """The name or color that `lookup(person, relation)` finds."""
    values = read_call(SIGNATURES, name, arguments)
    if values is None:
        return BAD_CALL
    person, relation = values
    found = world["people"].get(person, {}).get(relation)
    return BAD_CALL if found is None else str(found)
