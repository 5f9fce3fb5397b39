"""One SQLite connection: durable transactions, and errors that say what to do.

WAL with `synchronous=FULL`: a commit returns after its WAL frames are on disk, so a power cut loses
nothing that was acknowledged; NORMAL would lose the last commits. The price is one fsync a commit,
which `store.group_commit` shares among everyone who waits.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nestling.core.errors import StoreError
from nestling.store.schema import RUN, Schema

__all__ = ["Connection"]

_BUSY_TIMEOUT_S = 30.0
"""How long a writer waits for another process's transaction."""

_ERRORS = (sqlite3.Error, UnicodeDecodeError)
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


class Connection:
    """A connection for the threads of one process; a transaction belongs to one thread at a time.

    Inside a transaction, another `transaction()` of the same thread is a savepoint: it can fail
    and be undone alone. `after_commit` callbacks run once the outermost one is on disk.
    """

    def __init__(
        self,
        path: Path,
        *,
        schema: Schema = RUN,
        read_only: bool = False,
        busy_timeout_s: float = _BUSY_TIMEOUT_S,
    ) -> None:
        self.path = path
        self._schema = schema
        self._busy_timeout_s = busy_timeout_s
        self.read_only = read_only
        self._lock = threading.RLock()
        self._depth = 0
        self._owner = 0
        self._pending: list[Callable[[], None]] = []
        unclean = _has_wal(path)
        try:
            self._sqlite = _connect(path, read_only, busy_timeout_s)
        except _ERRORS as error:
            raise self._explain(error) from error
        try:
            self._prepare(unclean)
        except _ERRORS as error:
            self._sqlite.close()
            raise self._explain(error) from error
        except StoreError:
            self._sqlite.close()
            raise

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; on return of the outermost one the changes are on disk.

        Raises `StoreError` when the store is busy, full, damaged or read-only.
        """
        with self._lock:
            depth = self._depth
            callbacks = len(self._pending)
            self.execute("BEGIN IMMEDIATE" if depth == 0 else f"SAVEPOINT s{depth}")
            self._depth = depth + 1
            self._owner = threading.get_ident()
            try:
                yield
                self.execute("COMMIT" if depth == 0 else f"RELEASE s{depth}")
            except BaseException:
                self._depth = depth
                del self._pending[callbacks:]
                self._undo(depth)
                raise
            self._depth = depth
            if depth == 0:
                ready, self._pending = self._pending, []
                for callback in ready:
                    callback()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """The present transaction of this thread, without a savepoint of its own, or a new one.

        For parts of a change whose failure always undoes the whole change: half the statements.
        """
        with self._lock:
            if self.in_transaction:
                yield
            else:
                with self.transaction():
                    yield

    @property
    def in_transaction(self) -> bool:
        """Whether this thread is inside a transaction."""
        return self._depth > 0 and self._owner == threading.get_ident()

    @property
    def is_open(self) -> bool:
        """Whether SQLite holds a transaction; it ends one by itself when the disk is full."""
        return self._sqlite.in_transaction

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Call back once the current transaction is on disk; dropped when it is undone."""
        self._pending.append(callback)

    def execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """One statement."""
        with self._lock:
            self._require_whole()
            try:
                return self._sqlite.execute(sql, values)
            except _ERRORS as error:
                raise self._explain(error) from error

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """One statement for many rows."""
        with self._lock:
            self._require_whole()
            try:
                self._sqlite.executemany(sql, rows)
            except _ERRORS as error:
                raise self._explain(error) from error

    def one(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Row | None:
        """The first row, or None."""
        with self._lock:
            try:
                row: sqlite3.Row | None = self._sqlite.execute(sql, values).fetchone()
            except _ERRORS as error:
                raise self._explain(error) from error
            return row

    def all(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Every row."""
        with self._lock:
            try:
                return self._sqlite.execute(sql, values).fetchall()
            except _ERRORS as error:
                raise self._explain(error) from error

    def check(self) -> None:
        """Read the whole file and raise `StoreError` when it is damaged; slow on a large run."""
        rows = self.all("PRAGMA quick_check(1)")
        if rows[0][0] != "ok":
            raise StoreError(_damaged(self.path, str(rows[0][0])))

    def close(self) -> None:
        """Close the file; may be called twice."""
        with self._lock:
            self._sqlite.close()

    def _prepare(self, unclean: bool) -> None:
        if not self.read_only:
            self._write_ahead()
            self._sqlite.execute("PRAGMA synchronous = FULL")
            self._sqlite.execute("PRAGMA foreign_keys = ON")
            self._sqlite.execute("PRAGMA wal_autocheckpoint = 4000")
        if self._version() < self._schema.version:
            self._upgrade()
        elif unclean and not self.read_only:
            self.check()

    def _write_ahead(self) -> None:
        """WAL mode. SQLite does not wait for others that open a new file at the same moment."""
        end_s = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                self._sqlite.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                if code not in _BUSY or time.monotonic() > end_s:
                    raise
                time.sleep(0.01)
            else:
                return

    def _version(self) -> int:
        schema = self._schema
        version = int(self._sqlite.execute("PRAGMA user_version").fetchone()[0])
        application = int(self._sqlite.execute("PRAGMA application_id").fetchone()[0])
        tables = int(self._sqlite.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0])
        if application not in (schema.application_id, 0) or (application == 0 and tables > 0):
            raise StoreError(
                f"{self.path} is no {schema.what} (application id {application:#x}); expected a "
                f"{schema.usual_name} written by nestling; choose another path"
            )
        if version > schema.version:
            raise StoreError(
                f"{self.path} has schema version {version}; this nestling reads up to "
                f"{schema.version}; install the newer nestling that wrote it"
            )
        return version

    def _upgrade(self) -> None:
        if self.read_only:
            raise StoreError(
                f"{self.path} has an older schema; expected version {self._schema.version}; open it "
                f"once for writing, for example with `nestling run --resume`"
            )
        with self.transaction():
            # Asked again: another process may have upgraded it while this one waited.
            version = self._version()
            if version < self._schema.version:
                self._schema.migrate(self._sqlite, version)

    def _require_whole(self) -> None:
        """Refuse to go on inside a transaction that SQLite has ended, or half of it would stay."""
        if self._depth > 0 and not self._sqlite.in_transaction:
            raise StoreError(
                f"{self.path}: the transaction was undone after an earlier error, for example a "
                f"full disk; nothing of it was recorded; free disk space and repeat it"
            )

    def _undo(self, depth: int) -> None:
        """Roll back; SQLite has already done it after some errors, for example a full disk."""
        if not self._sqlite.in_transaction:
            return
        if depth == 0:
            self._sqlite.execute("ROLLBACK")
        else:
            self._sqlite.execute(f"ROLLBACK TO s{depth}")
            self._sqlite.execute(f"RELEASE s{depth}")

    def _explain(self, error: Exception) -> StoreError:
        if isinstance(error, UnicodeDecodeError):  # an error message that quotes damaged text
            return StoreError(_damaged(self.path, "its schema cannot be read"))
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and not self.read_only):
            return StoreError(
                f"cannot write {self.path}: {error}; this change was not recorded, all earlier "
                f"ones are kept; free disk space, then continue with `nestling run --resume`"
            )
        if code in _BUSY:
            return StoreError(
                f"{self.path} stayed locked by another process ({error}); expected writers to "
                f"finish within seconds; stop the other process, then try again"
            )
        if code in _DAMAGED:
            return StoreError(_damaged(self.path, str(error)))
        if code == sqlite3.SQLITE_CANTOPEN:
            return StoreError(
                f"cannot open {self.path}: {error}; expected an existing, "
                f"{'readable' if self.read_only else 'writable'} folder; check the path and its "
                f"permissions"
            )
        if code == sqlite3.SQLITE_CONSTRAINT:
            return StoreError(
                f"{self.path} refused a change: {error}; expected records to be added once and "
                f"after those that they belong to (group, then episode, then turn)"
            )
        if code == sqlite3.SQLITE_READONLY:
            return StoreError(
                f"{self.path} is read-only; expected to be able to write; open the run for "
                f"writing or fix the permissions"
            )
        return StoreError(f"{self._schema.what} {self.path}: {error}")


def _connect(path: Path, read_only: bool, busy_timeout_s: float) -> sqlite3.Connection:
    uri = f"{path.resolve().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    connection = sqlite3.connect(
        uri, uri=True, isolation_level=None, check_same_thread=False, timeout=busy_timeout_s
    )
    connection.row_factory = sqlite3.Row
    return connection


def _has_wal(path: Path) -> bool:
    wal = path.with_name(path.name + "-wal")
    return wal.exists() and wal.stat().st_size > 0


def _damaged(path: Path, what: str) -> str:
    return (
        f"{path} is damaged ({what}); expected a sound SQLite file; keep a copy, then recover what "
        f"is readable with `sqlite3 {path.name} .recover | sqlite3 recovered.db`, or restore a backup"
    )
