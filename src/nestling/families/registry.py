"""All families by name: five train the agent, one is held out to test it."""

from __future__ import annotations

from typing import Final

from nestling.core.errors import ConfigError
from nestling.families.calc_chain import CALC_CHAIN
from nestling.families.dispatch import DISPATCH
from nestling.families.family import Family
from nestling.families.ledger import LEDGER
from nestling.families.multi_hop import MULTI_HOP
from nestling.families.string_pipeline import STRING_PIPELINE
from nestling.families.triage import TRIAGE

__all__ = ["ALL", "HELD_OUT", "TRAINING", "get"]

_FAMILIES: Final[tuple[Family, ...]] = (
    CALC_CHAIN,
    MULTI_HOP,
    STRING_PIPELINE,
    LEDGER,
    DISPATCH,
    TRIAGE,
)

ALL: Final[tuple[str, ...]] = tuple(family.name for family in _FAMILIES)
"""Every family's name."""
TRAINING: Final[tuple[str, ...]] = tuple(f.name for f in _FAMILIES if not f.held_out)
"""Families that train the agent."""
HELD_OUT: Final[tuple[str, ...]] = tuple(f.name for f in _FAMILIES if f.held_out)
"""Families that only ever test the agent."""


def get(name: str | Family) -> Family:
    """The family of that name; a family is returned as it is.

    Raises:
        ConfigError: there is none.
    """
    if not isinstance(name, str):
        return name
    for family in _FAMILIES:
        if family.name == name:
            return family
    raise ConfigError(
        f"unknown family {name!r}; expected one of {', '.join(ALL)}; check the spelling"
    )
