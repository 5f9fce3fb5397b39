"""The tables of a run, and how an older file becomes a newer one.

`PRAGMA user_version` holds the schema version. Entry v of a schema's migrations takes a file from
version v to v + 1; a released entry is never edited, a change is a new entry. (`scores` is of the first
version and not used any more; outcomes hold what was scored.) Money is in whole micro-dollars, so sums
are exact. Moments (`*_at`) are seconds since the epoch; leases also carry the monotonic clock, so
that a jump of the wall clock expires nothing.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

__all__ = ["RUN", "Schema"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """What one kind of file holds."""

    what: str
    """Its name in messages."""
    usual_name: str
    application_id: int
    """Tells it from any other SQLite file."""
    migrations: tuple[str, ...]

    @property
    def version(self) -> int:
        """The newest version."""
        return len(self.migrations)

    def migrate(self, connection: sqlite3.Connection, version: int) -> None:
        """Bring an open transaction's file from `version` to the newest; the caller commits."""
        for number, script in enumerate(self.migrations[version:], start=version + 1):
            for statement in _statements(script):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
        connection.execute(f"PRAGMA application_id = {self.application_id}")


_V1 = """
CREATE TABLE meta (
  key TEXT PRIMARY KEY,
  value TEXT NOT NULL
) STRICT;

CREATE TABLE events (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  at REAL NOT NULL,
  kind TEXT NOT NULL,
  subject TEXT NOT NULL,
  data TEXT NOT NULL
) STRICT;
CREATE INDEX events_by_subject ON events (subject, seq);

CREATE TABLE metrics (
  name TEXT NOT NULL,
  step INTEGER NOT NULL,
  value REAL NOT NULL,
  at REAL NOT NULL,
  PRIMARY KEY (name, step)
) STRICT, WITHOUT ROWID;

CREATE TABLE learner_versions (
  version INTEGER PRIMARY KEY,
  step INTEGER NOT NULL,
  handle TEXT NOT NULL,
  state_ref TEXT,
  content_hash TEXT,
  state TEXT NOT NULL DEFAULT '{}',
  published_at REAL NOT NULL
) STRICT;

CREATE TABLE steps (
  step INTEGER PRIMARY KEY,
  state TEXT NOT NULL CHECK (state IN ('running', 'done')),
  started_at REAL NOT NULL,
  finished_at REAL,
  learner_version INTEGER,
  summary TEXT NOT NULL DEFAULT '{}'
) STRICT;

CREATE TABLE groups (
  id TEXT PRIMARY KEY,
  purpose TEXT NOT NULL,
  step INTEGER NOT NULL,
  family TEXT NOT NULL,
  seed INTEGER NOT NULL,
  size INTEGER NOT NULL CHECK (size > 0),
  learner_version INTEGER,
  state TEXT NOT NULL CHECK (state IN ('open', 'complete', 'used', 'dropped')),
  used_in_step INTEGER,
  created_at REAL NOT NULL
) STRICT;
CREATE INDEX groups_by_step ON groups (purpose, step);

CREATE TABLE episodes (
  id TEXT PRIMARY KEY,
  group_id TEXT NOT NULL REFERENCES groups (id),
  idx INTEGER NOT NULL,
  family TEXT NOT NULL,
  policy TEXT NOT NULL,
  seed INTEGER NOT NULL,
  learner_version INTEGER,
  state TEXT NOT NULL CHECK (state IN ('running', 'finished', 'failed')),
  outcome TEXT,
  started_at REAL NOT NULL,
  finished_at REAL,
  summary TEXT NOT NULL DEFAULT '{}',
  UNIQUE (group_id, idx)
) STRICT;

CREATE TABLE turns (
  episode_id TEXT NOT NULL REFERENCES episodes (id),
  idx INTEGER NOT NULL,
  text TEXT NOT NULL,
  truncated INTEGER NOT NULL CHECK (truncated IN (0, 1)),
  ids BLOB,
  logprobs BLOB,
  observation TEXT,
  learner_version INTEGER,
  at REAL NOT NULL,
  PRIMARY KEY (episode_id, idx)
) STRICT;

CREATE TABLE trajectories (
  episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
  num_tokens INTEGER NOT NULL,
  ids BLOB NOT NULL,
  sampled BLOB NOT NULL,
  logprobs BLOB NOT NULL
) STRICT;

CREATE TABLE attempts (
  episode_id TEXT NOT NULL REFERENCES episodes (id),
  idx INTEGER NOT NULL,
  job_hash TEXT,
  accepted INTEGER NOT NULL CHECK (accepted IN (0, 1)),
  problems TEXT NOT NULL,
  job_id TEXT,
  at REAL NOT NULL,
  PRIMARY KEY (episode_id, idx)
) STRICT;

CREATE TABLE rewards (
  episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
  kind TEXT NOT NULL,
  reward REAL NOT NULL,
  terms TEXT NOT NULL,
  at REAL NOT NULL
) STRICT;

CREATE TABLE scores (
  id INTEGER PRIMARY KEY,
  phase TEXT NOT NULL,
  family TEXT NOT NULL,
  split TEXT NOT NULL,
  base_model TEXT NOT NULL,
  model_hash TEXT NOT NULL,
  job_id TEXT,
  num_items INTEGER NOT NULL CHECK (num_items > 0),
  num_correct INTEGER NOT NULL,
  correct BLOB NOT NULL,
  at REAL NOT NULL
) STRICT;
CREATE UNIQUE INDEX scores_once ON scores (phase, family, split, model_hash, ifnull(job_id, ''));
CREATE INDEX scores_by_job ON scores (job_id);

CREATE TABLE jobs (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  kind TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('queued', 'running', 'done', 'failed')),
  lane TEXT NOT NULL,
  group_key TEXT NOT NULL,
  priority INTEGER NOT NULL,
  episode_id TEXT,
  family TEXT,
  reuse_key TEXT,
  payload TEXT NOT NULL,
  result TEXT,
  reason TEXT,
  detail TEXT,
  tries INTEGER NOT NULL DEFAULT 0,
  max_tries INTEGER NOT NULL CHECK (max_tries > 0),
  deadline_s REAL NOT NULL CHECK (deadline_s > 0),
  queued_at REAL NOT NULL,
  started_at REAL,
  finished_at REAL,
  worker TEXT
) STRICT;
CREATE INDEX jobs_waiting ON jobs (lane, priority, group_key, seq) WHERE state = 'queued';
CREATE UNIQUE INDEX jobs_reuse ON jobs (reuse_key) WHERE reuse_key IS NOT NULL AND state <> 'failed';

CREATE TABLE shares (
  lane TEXT NOT NULL,
  priority INTEGER NOT NULL,
  group_key TEXT NOT NULL,
  queued INTEGER NOT NULL DEFAULT 0 CHECK (queued >= 0),
  running INTEGER NOT NULL DEFAULT 0 CHECK (running >= 0),
  served INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (lane, priority, group_key)
) STRICT, WITHOUT ROWID;
CREATE INDEX shares_next ON shares (lane, priority DESC, running, served, group_key) WHERE queued > 0;

CREATE TABLE leases (
  job_id TEXT PRIMARY KEY REFERENCES jobs (id),
  token TEXT NOT NULL UNIQUE,
  worker TEXT NOT NULL,
  session TEXT NOT NULL,
  acquired_at REAL NOT NULL,
  heartbeat_at REAL NOT NULL,
  acquired_mono_s REAL NOT NULL,
  expires_mono_s REAL NOT NULL,
  stage TEXT
) STRICT, WITHOUT ROWID;
CREATE INDEX leases_by_expiry ON leases (expires_mono_s);

CREATE TABLE processes (
  name TEXT PRIMARY KEY,
  pid INTEGER NOT NULL,
  start_ticks INTEGER NOT NULL,
  boot_id TEXT NOT NULL,
  launched_at REAL NOT NULL
) STRICT;

CREATE TABLE money (
  id TEXT PRIMARY KEY,
  episode_id TEXT,
  job_id TEXT,
  family TEXT,
  machine TEXT NOT NULL,
  day TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('reserved', 'settled')),
  reserved_microusd INTEGER NOT NULL CHECK (reserved_microusd >= 0),
  spent_microusd INTEGER NOT NULL DEFAULT 0 CHECK (spent_microusd >= 0),
  seconds REAL NOT NULL DEFAULT 0,
  reserved_at REAL NOT NULL,
  settled_at REAL
) STRICT;
CREATE INDEX money_by_job ON money (job_id);

CREATE TABLE money_totals (
  scope TEXT PRIMARY KEY,
  reserved_microusd INTEGER NOT NULL CHECK (reserved_microusd >= 0),
  spent_microusd INTEGER NOT NULL CHECK (spent_microusd >= 0)
) STRICT, WITHOUT ROWID;
"""

_V2 = """
ALTER TABLE jobs ADD COLUMN predicted_s REAL NOT NULL DEFAULT 0 CHECK (predicted_s >= 0);
DROP INDEX jobs_waiting;
CREATE INDEX jobs_waiting ON jobs (lane, priority, group_key, predicted_s DESC, seq)
  WHERE state = 'queued';
CREATE INDEX jobs_longest ON jobs (lane, priority, predicted_s DESC, seq) WHERE state = 'queued';
"""

RUN = Schema(
    what="run store",
    usual_name="run.db",
    application_id=0x4E53544C,  # NSTL
    migrations=(_V1, _V2),
)


def _statements(script: str) -> list[str]:
    """The statements of a script; `executescript` would commit the transaction first."""
    statements: list[str] = []
    pending = ""
    for line in script.splitlines():
        pending += line + "\n"
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return statements
