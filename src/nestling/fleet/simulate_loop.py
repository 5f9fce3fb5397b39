"""An event loop whose time jumps: an hour of waiting takes no time, the work done in it does.

Everything that waits with asyncio (sleeps, timeouts, `call_later`) runs on the loop's `time`. When
nothing is ready, that time moves to the next timer instead of passing. It stands still while
`holding` says that another thread is at work whose answer belongs to the present moment.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

__all__ = ["VirtualClock", "VirtualTimeLoop"]

_EPOCH_S = 1_900_000_000.0


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        self._num_holds = 0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_s

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keep time where it is until the block is left; for answers from other threads."""
        self._num_holds += 1
        try:
            yield
        finally:
            self._num_holds -= 1

    @property
    def is_held(self) -> bool:
        """Whether time may not move."""
        return self._num_holds > 0

    def jump(self, seconds: float) -> None:
        """Move time forward."""
        self._virtual_s += seconds


class VirtualClock:
    """The loop's time as a `core.clock.Clock`; may be read from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        """Seconds since the epoch, from a fixed moment on."""
        return _EPOCH_S + self._loop.time()

    def monotonic(self) -> float:
        """Seconds since the loop was made."""
        return self._loop.time()


class _JumpingSelector(selectors.BaseSelector):
    """Looks for real events without waiting, then moves the loop's time by what it would wait."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop
        self._real = selectors.DefaultSelector()

    def register(
        self, fileobj: FileDescriptorLike, events: int, data: object = None
    ) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or (timeout > 0 and self._loop.is_held):
            return self._real.select(None)
        ready = self._real.select(0)
        if not ready and timeout > 0:
            self._loop.jump(timeout)
        return ready

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        return self._real.get_map()
