# mypy: disable-error-code="misc,untyped-decorator"
"""multi_hop: the persona look-up as a verifiers toolset.

As a script it serves the tools to one rollout.
"""

import random

import verifiers.v1 as vf
from pydantic import StrictStr

from . import multi_hop as rules
from .rollout import Data, RolloutState, RolloutTools

__all__ = ["Data", "State", "Tools", "sample"]


class State(RolloutState):
    """Only the counts: these tools remember nothing."""


class Tools(RolloutTools, vf.Toolset[vf.ToolsetConfig, State]):
    """lookup."""

    rules = rules

    @vf.tool
    def lookup(self, person: StrictStr, relation: StrictStr) -> str:
        """Who a person's boss, friend, mentor or twin is, or their color."""
        return self.use("lookup", person=person, relation=relation)


def sample(rng: random.Random, lo: int, hi: int) -> Data:
    """One training row with a difficulty between lo and hi."""
    return Data(**rules.sample(rng, lo, hi).to_dict())


if __name__ == "__main__":
    Tools.run()
