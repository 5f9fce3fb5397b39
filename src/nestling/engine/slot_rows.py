"""Which cache row each slot uses: slots whose tokens have been the same so far use one.

Rows of a GRPO group begin with one prompt and often go on alike, and a call of the same tool has the same result. What is
the same is computed once: a slot is given a row of its own when its next token differs. Rows in use are kept at the front,
because a decode step computes every row before the last one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Copies", "SlotRows"]

_Indices = npt.NDArray[np.int64]

_NO_ROW, _NO_SEQUENCE = -1, -2
_COMPACT_BELOW = 0.8
_LABEL_BITS = 40
"""Room for a position times the vocabulary's size."""


class Copies(NamedTuple):
    """Cache rows to be copied from `source` to `target`, in one go."""

    source: list[int]
    target: list[int]


class SlotRows:
    """Slots and the cache rows they use."""

    def __init__(self, num_slots: int) -> None:
        self.row: _Indices = np.full(num_slots, _NO_SEQUENCE)
        """Per slot; negative while it has none."""
        self.num_rows = 0
        """Every row in use is below this."""
        self._any_shared = False
        self._any_unused = False

    def begin(self, slot: int) -> None:
        """The slot's next sequence starts, with nothing cached."""
        self.row[slot] = _NO_ROW

    def release(self, slots: _Indices) -> None:
        """The sequences in these slots have ended."""
        self.row[slots] = _NO_SEQUENCE
        self._any_unused = True

    def open(self) -> _Indices:
        """Slots that hold a sequence."""
        return np.nonzero(self.row != _NO_SEQUENCE)[0]

    def join(self, slots: _Indices) -> None:
        """All of these have cached what the first has."""
        self.row[slots] = self.row[slots[0]]
        self._any_shared = True

    def place(self, slots: _Indices) -> _Indices:
        """Rows for those of the slots that have none; the new rows."""
        bare = slots[self.row[slots] == _NO_ROW]
        fresh = self._free(len(bare))
        self.row[bare] = fresh
        return fresh

    def split(self, slots: _Indices, labels: _Indices) -> Copies:
        """Part slots of one row that have different labels (from 0, below 2^40); the smallest label keeps the row."""
        if not self._any_shared:
            return Copies([], [])
        pair = (self.row[slots] << _LABEL_BITS) + labels
        distinct, which = np.unique(pair, return_inverse=True)
        row = distinct >> _LABEL_BITS
        parted = np.nonzero(row[1:] == row[:-1])[0] + 1
        source = row[parted]
        row[parted] = self._free(len(parted))
        self.row[slots] = row[which]
        self._any_shared = len(distinct) < len(slots)
        return Copies(source.tolist(), row[parted].tolist())

    def close_gaps(self) -> Copies:
        """Move rows from the end into unused ones, when many are unused."""
        if not self._any_unused:
            return Copies([], [])
        self._any_unused = False
        used = np.unique(self.row[self.row >= 0])
        if len(used) > _COMPACT_BELOW * self.num_rows:
            return Copies([], [])
        source = used[used >= len(used)]
        target = np.setdiff1d(np.arange(len(used)), used)
        moved = np.arange(self.num_rows)
        moved[source] = target
        placed = self.row >= 0
        self.row[placed] = moved[self.row[placed]]
        self.num_rows = len(used)
        return Copies(source.tolist(), target.tolist())

    def _free(self, count: int) -> _Indices:
        """Unused rows, the first ones."""
        if count == 0:
            return self.row[:0]
        limit = self.num_rows + count
        found = np.setdiff1d(np.arange(limit), self.row)[:count]
        self.num_rows = max(self.num_rows, int(found[-1]) + 1)
        return found
