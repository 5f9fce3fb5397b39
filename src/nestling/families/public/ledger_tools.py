# mypy: disable-error-code="misc,untyped-decorator"
"""ledger: the accounts as a verifiers toolset.

As a script it serves the tools to one rollout.
"""

import random

import verifiers.v1 as vf
from pydantic import Field, StrictInt, StrictStr

from . import ledger as rules
from .rollout import Data, RolloutState, RolloutTools

__all__ = ["Data", "State", "Tools", "sample"]


class State(RolloutState):
    """Money as it stands in this rollout."""

    balances: dict[str, int] = Field(default_factory=dict)
    """Account to money, filled from the row at the first call."""


class Tools(RolloutTools, vf.Toolset[vf.ToolsetConfig, State]):
    """deposit, withdraw, transfer, balance."""

    rules = rules

    @vf.tool
    def deposit(self, account: StrictStr, amount: StrictInt) -> str:
        """Add an amount to an account."""
        return self.use("deposit", account=account, amount=amount)

    @vf.tool
    def withdraw(self, account: StrictStr, amount: StrictInt) -> str:
        """Take an amount from an account; refused when funds are short."""
        return self.use("withdraw", account=account, amount=amount)

    @vf.tool
    def transfer(self, source: StrictStr, target: StrictStr, amount: StrictInt) -> str:
        """Move an amount between accounts; refused when funds are short."""
        return self.use("transfer", source=source, target=target, amount=amount)

    @vf.tool
    def balance(self, account: StrictStr) -> str:
        """What an account holds."""
        return self.use("balance", account=account)


def sample(rng: random.Random, lo: int, hi: int) -> Data:
    """One training row with a difficulty between lo and hi."""
    return Data(**rules.sample(rng, lo, hi).to_dict())


if __name__ == "__main__":
    Tools.run()
