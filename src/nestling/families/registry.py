"""All families by name: ours (five train the agent, one is held out to test it) and plug-ins."""

from __future__ import annotations

import difflib
from typing import Final

from nestling.core.errors import ConfigError
from nestling.families.calc_chain import CALC_CHAIN
from nestling.families.dispatch import DISPATCH
from nestling.families.family import Family
from nestling.families.ledger import LEDGER
from nestling.families.multi_hop import MULTI_HOP
from nestling.families.plugins import installed_names, load
from nestling.families.string_pipeline import STRING_PIPELINE
from nestling.families.triage import TRIAGE

__all__ = ["ALL", "HELD_OUT", "TRAINING", "get", "names"]

_FAMILIES: Final[tuple[Family, ...]] = (
    CALC_CHAIN,
    MULTI_HOP,
    STRING_PIPELINE,
    LEDGER,
    DISPATCH,
    TRIAGE,
)

ALL: Final[tuple[str, ...]] = tuple(family.name for family in _FAMILIES)
"""Every shipped family's name."""
TRAINING: Final[tuple[str, ...]] = tuple(f.name for f in _FAMILIES if not f.held_out)
"""Shipped families that train the agent."""
HELD_OUT: Final[tuple[str, ...]] = tuple(f.name for f in _FAMILIES if f.held_out)
"""Shipped families that only ever test the agent."""


def names() -> tuple[str, ...]:
    """Our families, then those of installed packages; a plug-in never replaces one of ours."""
    return (*ALL, *(name for name in installed_names() if name not in ALL))


def get(name: str | Family) -> Family:
    """The family of that name; a family is returned as it is.

    Raises:
        ConfigError: there is none, or the plug-in of that name is broken.
    """
    if not isinstance(name, str):
        return name
    for family in _FAMILIES:
        if family.name == name:
            return family
    known = names()
    if name in known:
        return load(name)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "check the spelling, or install its package"
    raise ConfigError(f"unknown family {name!r}; expected one of {', '.join(known)}; {hint}")
