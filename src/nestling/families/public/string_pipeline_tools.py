# mypy: disable-error-code="misc,untyped-decorator"
"""string_pipeline: the string operations as a verifiers toolset.

As a script it serves the tools to one rollout.
"""

import random

import verifiers.v1 as vf
from pydantic import StrictStr

from . import string_pipeline as rules
from .rollout import Data, RolloutState, RolloutTools

__all__ = ["Data", "State", "Tools", "sample"]


class State(RolloutState):
    """Only the counts: these tools remember nothing."""


class Tools(RolloutTools, vf.Toolset[vf.ToolsetConfig, State]):
    """apply."""

    rules = rules

    @vf.tool
    def apply(self, operation: StrictStr, text: StrictStr) -> str:
        """The text after reverse, rotate, swap, drop or double."""
        return self.use("apply", operation=operation, text=text)


def sample(rng: random.Random, lo: int, hi: int) -> Data:
    """One training row with a difficulty between lo and hi."""
    return Data(**rules.sample(rng, lo, hi).to_dict())


if __name__ == "__main__":
    Tools.run()
