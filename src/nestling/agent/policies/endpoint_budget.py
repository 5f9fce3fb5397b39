"""Tokens and money of an endpoint, capped before they are spent."""

from __future__ import annotations

from dataclasses import dataclass

from nestling.agent.policies.endpoint_config import TokenPrices
from nestling.core.errors import NestlingError

__all__ = ["BudgetSpentError", "TokenBudget", "Usage"]


class BudgetSpentError(NestlingError):
    """A request could pass a cap; it was not sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request, or of many."""

    tokens_in: int = 0
    tokens_out: int = 0

    def __add__(self, other: Usage) -> Usage:
        """Both together."""
        return Usage(
            tokens_in=self.tokens_in + other.tokens_in,
            tokens_out=self.tokens_out + other.tokens_out,
        )


class TokenBudget:
    """What was used and what requests under way may still use; their sum never passes a cap."""

    def __init__(
        self,
        *,
        max_tokens: int | None = None,
        max_usd: float | None = None,
        prices: TokenPrices | None = None,
    ) -> None:
        self._max_tokens = max_tokens
        self._max_usd = max_usd
        self._prices = prices
        self._under_way: list[Usage] = []
        self.used = Usage()
        """Settled requests; those of unknown size count as large as they might have been."""

    @property
    def used_usd(self) -> float | None:
        """None without prices."""
        return self._usd(self.used)

    def reserve(self, most: Usage) -> Usage:
        """Set aside what a request may use at most; raises `BudgetSpentError`."""
        total = most
        for one in (self.used, *self._under_way):
            total = total + one
        tokens, usd = total.tokens_in + total.tokens_out, self._usd(total)
        if self._max_tokens is not None and tokens > self._max_tokens:
            raise BudgetSpentError(
                f"the next turn could bring the endpoint to {tokens} tokens; the cap is "
                f"{self._max_tokens}; raise max_tokens"
            )
        if self._max_usd is not None and usd is not None and usd > self._max_usd:
            raise BudgetSpentError(
                f"the next turn could bring the endpoint to {usd:.4f} USD; the cap is "
                f"{self._max_usd}; raise max_usd"
            )
        self._under_way.append(most)
        return most

    def settle(self, reserved: Usage, used: Usage | None) -> None:
        """Replace a reservation by what was used; None: unknown, so all of it."""
        self._under_way.remove(reserved)
        self.used = self.used + (reserved if used is None else used)

    def _usd(self, usage: Usage) -> float | None:
        if self._prices is None:
            return None
        return self._prices.cost_usd(usage.tokens_in, usage.tokens_out)
