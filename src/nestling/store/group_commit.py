"""Many small durable changes with one fsync for all that wait.

A thread takes whatever has been handed in, does it in one transaction (each piece in its own
savepoint, so one that fails is undone alone), commits, and only then answers. A caller that has
its answer knows that it is on disk. An event loop is never blocked by the disk.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from nestling.core.errors import StoreError
from nestling.store.run_store import RunStore

__all__ = ["GroupCommit"]

T = TypeVar("T")

_LARGEST_BATCH = 512
"""Bounds how long one answer waits for its neighbours; 512 changes take about 30 ms."""

_QUEUE_LIMIT = 65_536
"""Callers block beyond this many waiting changes."""


class GroupCommit:
    """Runs store changes in one thread, in the order they were handed in."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self._queue: queue.Queue[tuple[Callable[[], Any], Future[Any]] | None] = queue.Queue(
            _QUEUE_LIMIT
        )
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, change: Callable[[], T]) -> Future[T]:
        """Hand in a change; the future has its value once it is on disk.

        The change may run again when the batch it was in could not be committed, so it must have
        no effect but on the store.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise StoreError(f"the writer of {self.store.path} is closed; open the run again")
            self._queue.put((change, future))
        return future

    async def run(self, change: Callable[[], T]) -> T:
        """The change's value once it is on disk.

        A caller that is cancelled takes back a change that still waits; one that was begun is made.
        """
        return await asyncio.wrap_future(self.submit(change))

    def close(self) -> None:
        """Finish what was handed in and stop; may be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _serve(self) -> None:
        last = False
        while not last:
            batch, last = self._next_batch()
            if batch:
                self.commit_batch(batch)

    def _next_batch(self) -> tuple[list[tuple[Callable[[], Any], Future[Any]]], bool]:
        batch: list[tuple[Callable[[], Any], Future[Any]]] = []
        item = self._queue.get()
        while item is not None:
            # A future that was cancelled while it waited is not run at all.
            if item[1].set_running_or_notify_cancel():
                batch.append(item)
            if len(batch) >= _LARGEST_BATCH:
                return batch, False
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def commit_batch(self, batch: list[tuple[Callable[[], Any], Future[Any]]]) -> None:
        """Do these in one transaction and answer each; in the thread that calls."""
        if len(batch) == 1:
            self._commit_alone(*batch[0])
            return
        try:
            with self.store.transaction():
                answers = [_attempt(self.store, change) for change, _ in batch]
        except Exception as error:  # noqa: BLE001 (handed to whoever waits, never lost)
            if isinstance(error, StoreError):
                # One change too large for the disk must not fail its neighbours.
                for item in batch:
                    self.commit_batch([item])
                return
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), (value, failure) in zip(batch, answers, strict=True):
            if failure is None:
                future.set_result(value)
            else:
                future.set_exception(failure)

    def _commit_alone(self, change: Callable[[], Any], future: Future[Any]) -> None:
        """A change without neighbours needs no savepoint."""
        try:
            with self.store.transaction():
                value = change()
        except Exception as error:  # noqa: BLE001 (handed to whoever waits, never lost)
            future.set_exception(error)
        else:
            future.set_result(value)


class _TransactionLostError(StoreError):
    """SQLite has rolled the whole batch back, not only one change."""


def _attempt(store: RunStore, change: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        with store.transaction():
            return change(), None
    except Exception as error:
        if not store.transaction_is_open():
            raise _TransactionLostError(str(error)) from error
        return None, error
