"""What all runs of one state folder share: the day's money, and how long jobs really took.

One SQLite file beside the state folder's other lasting things; any number of controllers use it at
the same time.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from nestling.core.clock import Clock, SystemClock
from nestling.store.connection import Connection
from nestling.store.history import History
from nestling.store.ledger import Ledger
from nestling.store.schema import Schema

__all__ = ["ACCOUNT", "Account"]

_V1 = """
CREATE TABLE reservations (
  run TEXT NOT NULL,
  id TEXT NOT NULL,
  day TEXT NOT NULL,
  microusd INTEGER NOT NULL CHECK (microusd >= 0),
  PRIMARY KEY (run, id)
) STRICT, WITHOUT ROWID;

CREATE TABLE days (
  day TEXT NOT NULL,
  run TEXT NOT NULL,
  reserved_microusd INTEGER NOT NULL CHECK (reserved_microusd >= 0),
  spent_microusd INTEGER NOT NULL CHECK (spent_microusd >= 0),
  PRIMARY KEY (day, run)
) STRICT, WITHOUT ROWID;

CREATE TABLE history (
  run TEXT NOT NULL,
  job TEXT NOT NULL,
  family TEXT NOT NULL,
  base TEXT NOT NULL,
  machine TEXT NOT NULL,
  turns REAL NOT NULL CHECK (turns >= 0),
  bound_s REAL NOT NULL CHECK (bound_s > 0),
  seconds REAL NOT NULL CHECK (seconds > 0),
  at REAL NOT NULL,
  PRIMARY KEY (run, job)
) STRICT, WITHOUT ROWID;
CREATE INDEX history_newest ON history (machine, base, family, at DESC);
"""

ACCOUNT = Schema(
    what="account file",
    usual_name="account.db",
    application_id=0x4E53544D,  # NSTM
    migrations=(_V1,),
)


class Account:
    """Open a state folder's account file; makes it when there is none.

    May be used from any thread. All failures are `StoreError`.
    """

    def __init__(self, path: Path, *, clock: Clock | None = None) -> None:
        self.path = path
        self._connection = Connection(path, schema=ACCOUNT)
        self.ledger = Ledger(self._connection)
        self.history = History(self._connection, clock or SystemClock())

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
