# mypy: disable-error-code="misc,untyped-decorator"
"""dispatch: orders and vehicles as a verifiers toolset.

As a script it serves the tools to one rollout.
"""

import random

import verifiers.v1 as vf
from pydantic import Field, StrictInt, StrictStr

from . import dispatch as rules
from .rollout import Data, RolloutState, RolloutTools

__all__ = ["Data", "State", "Tools", "sample"]


class State(RolloutState):
    """What was weighed and routed in this rollout."""

    weighed: list[int] = Field(default_factory=list)
    """Orders weighed so far, sorted."""
    routes: dict[str, str] = Field(default_factory=dict)
    """Order, as text, to vehicle."""


class Tools(RolloutTools, vf.Toolset[vf.ToolsetConfig, State]):
    """weigh, route, close."""

    rules = rules

    @vf.tool
    def weigh(self, order: StrictInt) -> str:
        """The weight of an order."""
        return self.use("weigh", order=order)

    @vf.tool
    def route(self, order: StrictInt, vehicle: StrictStr) -> str:
        """Send an order by truck, van or bike."""
        return self.use("route", order=order, vehicle=vehicle)

    @vf.tool
    def close(self) -> str:
        """Close the shift; gives the code that is the answer."""
        return self.use("close")


def sample(rng: random.Random, lo: int, hi: int) -> Data:
    """One training row with a difficulty between lo and hi."""
    return Data(**rules.sample(rng, lo, hi).to_dict())


if __name__ == "__main__":
    Tools.run()
