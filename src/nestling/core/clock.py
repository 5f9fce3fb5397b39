"""Time as a value that is passed in, so that nothing in a test sleeps."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Two clocks: one for people and records, one for measuring."""

    def now(self) -> float:
        """Seconds since the epoch; may jump."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()  # noqa: TID251 (the one home of the wall clock)

    def monotonic(self) -> float:
        """Seconds since boot."""
        return time.monotonic()
