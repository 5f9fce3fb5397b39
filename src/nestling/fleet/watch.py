"""Wait for the end of jobs without asking again and again."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from contextlib import suppress

from nestling.store.events import Event
from nestling.store.run_store import RunStore

__all__ = ["JobWatch"]

_ENDS = ("job.done", "job.failed")


class JobWatch:
    """Tells event loops of this process when a job is over, right after that is on disk."""

    def __init__(self, store: RunStore) -> None:
        self._lock = threading.Lock()
        """Protects `_waiting`: jobs end in the store's writer thread."""
        self._waiting: dict[str, list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]] = (
            defaultdict(list)
        )
        self._unsubscribe = store.events.subscribe(self._on_event)

    def expect(self, job_id: str) -> asyncio.Future[None]:
        """A future that is done once the job is over; ask for the job's state after this call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._waiting[job_id].append((loop, future))
        return future

    def forget(self, job_id: str, future: asyncio.Future[None] | None) -> bool:
        """Wait no more (None: never began to); True when nobody else waits for the job."""
        with self._lock:
            rest = [pair for pair in self._waiting.get(job_id, []) if pair[1] is not future]
            if rest:
                self._waiting[job_id] = rest
            else:
                self._waiting.pop(job_id, None)
            return not rest

    def close(self) -> None:
        """Stop listening."""
        self._unsubscribe()

    def _on_event(self, event: Event) -> None:
        if event.kind not in _ENDS:
            return
        with self._lock:
            waiting = self._waiting.pop(event.subject, [])
        for loop, future in waiting:
            with suppress(RuntimeError):  # that loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_set, future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
