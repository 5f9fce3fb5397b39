"""Which rows of the job's data set the next training step plays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, Literal

__all__ = ["RowSampler", "SamplingKind"]

SamplingKind = Literal["standard", "difficulty_pool"]

_EASY_FRACTION: Final = 0.1
"""Share of a step drawn from rows thought to be solved, in case that was luck."""
_HARD_FRACTION: Final = 0.2
"""Share of a step drawn from rows never solved, in case the model has learned since."""


class RowSampler:
    """Draws rows; learns from the rewards it is told.

    standard: rows in the order of the data set, again from the start; needs no generator.
    difficulty_pool: a row whose last group all scored the highest reward seen is easy, one whose
    last group all scored the lowest is hard, any other is normal; a step takes at most a tenth
    easy and a fifth hard rows as long as there are normal ones.
    """

    def __init__(self, num_rows: int, kind: SamplingKind, rng: random.Random) -> None:
        if num_rows < 1:
            raise ValueError("a data set needs at least one row")
        self._num_rows = num_rows
        self._kind = kind
        self._rng = rng
        self._position = 0
        self._last: dict[int, tuple[float, float]] = {}
        self._lowest = float("inf")
        self._highest = float("-inf")

    def draw(self, num_prompts: int) -> list[int]:
        """Rows for one step; repeats only when there are fewer rows than prompts."""
        if self._kind == "standard":
            rows = [(self._position + i) % self._num_rows for i in range(num_prompts)]
            self._position = (self._position + num_prompts) % self._num_rows
            return rows
        easy, hard = self._constant_rows(self._highest), self._constant_rows(self._lowest)
        rows = self._rng.sample(easy, min(int(num_prompts * _EASY_FRACTION), len(easy)))
        rows += self._rng.sample(hard, min(int(num_prompts * _HARD_FRACTION), len(hard)))
        normal = sorted(set(range(self._num_rows)) - set(easy) - set(hard))
        rows += self._rng.sample(normal, min(num_prompts - len(rows), len(normal)))
        if len(rows) < num_prompts:
            rest = [row for row in range(self._num_rows) if row not in rows]
            rows += self._rng.sample(rest, min(num_prompts - len(rows), len(rest)))
        while len(rows) < num_prompts:
            rows.append(self._rng.randrange(self._num_rows))
        return rows

    def tell(self, row: int, rewards: Sequence[float]) -> None:
        """The rewards of one group of rollouts on `row`."""
        self._last[row] = (min(rewards), max(rewards))
        self._lowest = min(self._lowest, *rewards)
        self._highest = max(self._highest, *rewards)

    def _constant_rows(self, reward: float) -> list[int]:
        """Rows whose last group all scored `reward`; none before two different rewards were seen."""
        if self._lowest >= self._highest:
            return []
        return sorted(row for row, last in self._last.items() if last == (reward, reward))
