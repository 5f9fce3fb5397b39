"""All attacks, by kind."""

from __future__ import annotations

from nestling.redteam.case import Case
from nestling.redteam.cases import (
    changing,
    crosstalk,
    episodes,
    escape,
    injection,
    leakage,
    network,
    no_teaching,
    protocol,
    resources,
    rewards,
    settings,
    spend,
    substitution,
    tampering,
    workspace_files,
)

__all__ = ["ALL"]

ALL: tuple[Case, ...] = tuple(
    case
    for module in (
        no_teaching,
        leakage,
        rewards,
        changing,
        tampering,
        substitution,
        protocol,
        workspace_files,
        escape,
        network,
        resources,
        crosstalk,
        settings,
        injection,
        spend,
        episodes,
    )
    for case in module.CASES
)
"""In the order of the report."""
