"""What a sweep found: arms, families, paired differences."""

from __future__ import annotations

from nestling.core.frozen import Frozen
from nestling.outer.episode_facts import Summary
from nestling.outer.stats import Estimate

__all__ = ["ALL_FAMILIES", "ArmResult", "Comparison", "Sweep"]

ALL_FAMILIES = "all"
"""Name of the row that pools every family of a sweep."""


class ArmResult(Frozen):
    """One arm on one family, or on all of them."""

    arm: str
    step: int
    family: str
    summary: Summary | None
    """None when no episode finished."""
    dead: int
    """Episodes that broke down and are missing from the summary."""


class Comparison(Frozen):
    """Reward of one arm minus reward of another on the same episodes."""

    arm: str
    against: str
    family: str
    difference: Estimate
    """Its n counts pairs."""


class Sweep(Frozen):
    """Everything one sweep found."""

    seed: int
    results: tuple[ArmResult, ...]
    comparisons: tuple[Comparison, ...]

    def result(self, arm: str, family: str = ALL_FAMILIES) -> ArmResult:
        """The row of this arm and family; `KeyError` when it was not measured."""
        for one in self.results:
            if (one.arm, one.family) == (arm, family):
                return one
        raise KeyError(f"arm {arm!r} was not measured on {family!r}")

    def comparison(self, arm: str, against: str, family: str = ALL_FAMILIES) -> Comparison | None:
        """The paired difference; None when no pair finished or it was not asked for."""
        for one in self.comparisons:
            if (one.arm, one.against, one.family) == (arm, against, family):
                return one
        return None
