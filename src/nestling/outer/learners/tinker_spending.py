"""What a run spends at the service, capped before it is spent and on disk while it is.

A call is counted at its most until its answer tells what it used, in memory as in the file: episodes that
play at the same time cannot pass the cap together, and a process that is killed loses no spending.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nestling.core.errors import LearnerError
from nestling.outer.learners.tinker_faults import TinkerFaultError
from nestling.outer.learners.tinker_prices import Prices, Usage
from nestling.outer.learners.tinker_states import StateFolder

__all__ = ["Bill", "Spending"]


@dataclass(slots=True)
class Bill:
    """What one call is counted as: its most until the caller knows better."""

    used: Usage


class Spending:
    """The tokens of one run; use it from one thread."""

    def __init__(
        self, states: StateFolder, prices: Prices | None, max_usd: float | None, base_model: str
    ) -> None:
        if max_usd is not None and prices is None:
            raise LearnerError(
                f"learner.max_usd={max_usd:g} needs the prices of {base_model}; expected a price file "
                "that lists it; name one in learner.price_file or remove the cap"
            )
        self._states = states
        self._prices = prices
        self._max_usd = max_usd
        self._under_way = Usage()
        self.used = self._reported = states.read_usage()
        """Of calls that ended; those that failed count as much as they might have cost."""

    @contextmanager
    def reserve(self, most: Usage) -> Iterator[Bill]:
        """Around one call; raises `TinkerFaultError` when it could pass the cap."""
        self._check(self.used + self._under_way + most)
        bill = Bill(most)
        self._under_way += most
        try:
            self._write()
            yield bill
        finally:
            self._under_way -= most
            self.used += bill.used
            self._write()

    def costs(self) -> dict[str, float]:
        """What was spent since the last call, by metric name; USD only where prices are known."""
        step = self.used - self._reported
        self._reported = self.used
        found = {
            "learner/prefill_tokens": float(step.prefill + step.cached_prefill),
            "learner/sample_tokens": float(step.sample),
            "learner/train_tokens": float(step.train),
        }
        if self._prices is not None:
            found["learner/step_usd"] = self._prices.usd(step)
            found["learner/total_usd"] = self._prices.usd(self.used)
        return found

    def _check(self, total: Usage) -> None:
        if self._max_usd is None or self._prices is None:
            return
        usd = self._prices.usd(total)
        if usd > self._max_usd:
            raise TinkerFaultError(
                "budget",
                f"the next call could bring the run to {usd:.4f} USD, {self._prices.usd(self.used):.4f} "
                f"are spent; the cap is max_usd={self._max_usd:g}",
            )

    def _write(self) -> None:
        self._states.write_usage(self.used + self._under_way)
