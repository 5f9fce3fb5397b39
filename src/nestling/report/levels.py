"""Reference policies as lines beside a curve: what they reach on the families of each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nestling.outer.heldout import UNTRAINED
from nestling.outer.stats import Estimate
from nestling.report.estimates import stratified
from nestling.report.reference_rows import is_checkpoint
from nestling.report.run_data import EpisodeRow, RunData

__all__ = ["family_level", "levels"]

_Value = Callable[[EpisodeRow], float | None]


def levels(data: RunData, value: _Value, name: str) -> dict[str, list[Estimate | None]]:
    """By reference arm, for each step: mean of `value` over the arm's measured episodes.

    Families weigh as much as they do among the step's episodes; None where the arm was not measured
    on all of them. Intervals redraw measured episodes within their families. `name` picks the
    random stream. An arm that has no value at all is left out.
    """
    found: dict[str, list[Estimate | None]] = {}
    for arm, by_family in _measured(data, value).items():
        known: dict[tuple[tuple[str, int], ...], Estimate | None] = {}
        line = []
        for row in data.steps:
            families = tuple(row.families.items())
            if families not in known:
                known[families] = _level(by_family, row.families, name, arm)
            line.append(known[families])
        if any(one is not None for one in line):
            found[arm] = line
    return found


def family_level(data: RunData, value: _Value, name: str, family: str) -> dict[str, Estimate]:
    """Mean of `value` on one family by reference arm."""
    found = {
        arm: _level(by_family, {family: 1}, name, arm)
        for arm, by_family in _measured(data, value).items()
    }
    return {arm: one for arm, one in found.items() if one is not None}


def _measured(data: RunData, value: _Value) -> dict[str, dict[str, list[float]]]:
    """Values by reference arm and family; the agent, untrained or not, is no reference arm."""
    found: dict[str, dict[str, list[float]]] = {}
    for one in data.episodes:
        if one.arm is None or one.arm == UNTRAINED or is_checkpoint(one.arm):
            continue
        if (x := value(one)) is not None:
            found.setdefault(one.arm, {}).setdefault(one.family, []).append(x)
    return dict(sorted(found.items()))


def _level(
    by_family: Mapping[str, list[float]], families: Mapping[str, int], name: str, arm: str
) -> Estimate | None:
    if not families or any(family not in by_family for family in families):
        return None
    strata = [(count, tuple(by_family[family])) for family, count in families.items()]
    return stratified(strata, "level", name, arm)
