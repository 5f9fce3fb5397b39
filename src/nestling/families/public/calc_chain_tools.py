# mypy: disable-error-code="misc,untyped-decorator"
"""calc_chain: the calculator as a verifiers toolset.

As a script it serves the tools to one rollout.
"""

import random

import verifiers.v1 as vf
from pydantic import StrictStr

from . import calc_chain as rules
from .rollout import Data, RolloutState, RolloutTools

__all__ = ["Data", "State", "Tools", "sample"]


class State(RolloutState):
    """Only the counts: these tools remember nothing."""


class Tools(RolloutTools, vf.Toolset[vf.ToolsetConfig, State]):
    """calc."""

    rules = rules

    @vf.tool
    def calc(self, expression: StrictStr) -> str:
        """The value of two integers joined by +, - or *, for example 17+5."""
        return self.use("calc", expression=expression)


def sample(rng: random.Random, lo: int, hi: int) -> Data:
    """One training row with a difficulty between lo and hi."""
    return Data(**rules.sample(rng, lo, hi).to_dict())


if __name__ == "__main__":
    Tools.run()
