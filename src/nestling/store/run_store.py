"""The run's memory in one SQLite file; everything a run must remember after a crash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from nestling.core.clock import Clock, SystemClock
from nestling.core.errors import StoreError
from nestling.store.connection import Connection
from nestling.store.episodes import Episodes
from nestling.store.events import EventLog, Metrics
from nestling.store.jobs import JobTable
from nestling.store.learner import LearnerVersions
from nestling.store.money import MoneyTable
from nestling.store.processes import Processes
from nestling.store.progress import Progress

__all__ = ["RunStore"]


class RunStore:
    """Open a run for reading and writing; makes or upgrades the file.

    Every changing method is durable on return, in one transaction with its event. Several changes
    that belong together go inside `with store.transaction():`. May be used from any thread. All
    failures are `StoreError` and leave the file as it was before the change.
    """

    def __init__(self, path: Path, *, clock: Clock | None = None, read_only: bool = False) -> None:
        self.path = path
        self.clock = clock or SystemClock()
        self._connection = Connection(path, read_only=read_only)
        connection, clock = self._connection, self.clock
        self.events = EventLog(connection, clock)
        self.metrics = Metrics(connection, clock)
        self.progress = Progress(connection, self.events, clock)
        self.episodes = Episodes(connection, self.events, clock)
        self.jobs = JobTable(connection, self.events, clock)
        self.learner = LearnerVersions(connection, self.events, clock)
        self.money = MoneyTable(connection, self.events, clock)
        self.processes = Processes(connection, self.events, clock)

    @classmethod
    def open_reader(cls, path: Path) -> RunStore:
        """Open an existing run for reading only, while others may write it."""
        if not path.exists():
            raise StoreError(f"no run store at {path}; expected the run.db of a run folder")
        return cls(path, read_only=True)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Several changes as one: all are on disk on return, or none."""
        with self._connection.transaction():
            yield

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Part of the present transaction, or a new one: for changes that fail as a whole.

        Cheaper than `transaction`, which inside another one can also be undone alone.
        """
        with self._connection.joined():
            yield

    def transaction_is_open(self) -> bool:
        """Whether SQLite still holds a transaction; some errors, a full disk for one, end it."""
        return self._connection.is_open

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Call back once the present transaction is on disk; dropped when it is undone."""
        self._connection.after_commit(callback)

    def set_meta(self, key: str, value: str) -> None:
        """Remember a fact about the run, for example a commitment or the version that wrote it."""
        with self.transaction():
            self._connection.execute(
                "INSERT INTO meta (key, value) VALUES (?1, ?2) "
                "ON CONFLICT DO UPDATE SET value = ?2",
                (key, value),
            )
            self.events.append("meta.set", key)

    def meta(self, key: str) -> str | None:
        """A fact about the run."""
        row = self._connection.one("SELECT value FROM meta WHERE key = ?", (key,))
        return None if row is None else str(row[0])

    def limit_pages(self, num_pages: int) -> None:
        """Let the file grow to this many pages at most; then writes raise `StoreError`."""
        self._connection.execute(f"PRAGMA max_page_count = {int(num_pages)}")

    def check(self) -> None:
        """Read the whole file; `StoreError` when it is damaged."""
        self._connection.check()

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
