"""Everything one episode did: turns, attempts, the token trajectory, the reward.

Turns are written as they happen, so that a resumed run replays them instead of sampling again.
Every write may be repeated with the same key: the first one stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from sqlite3 import Row
from typing import Any, Literal

from nestling.core.clock import Clock
from nestling.core.errors import StoreError
from nestling.store.blobs import (
    pack_flags,
    pack_floats,
    pack_ids,
    unpack_flags,
    unpack_floats,
    unpack_ids,
)
from nestling.store.connection import Connection
from nestling.store.events import EventLog

__all__ = [
    "AttemptRecord",
    "EpisodeRecord",
    "Episodes",
    "RewardRecord",
    "TrajectoryRecord",
    "TurnRecord",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """One episode as it stands."""

    id: str
    group_id: str
    idx: int
    """Place in its group."""
    family: str
    policy: str
    seed: int
    learner_version: int | None
    state: Literal["running", "finished", "failed"]
    """failed: our side broke; whatever the agent did wrong is a finished episode."""
    outcome: str | None
    """What became of it, for example `trained` or `never_valid`."""
    started_at: float
    finished_at: float | None
    summary: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn of the agent and what it was told back."""

    episode_id: str
    idx: int
    text: str
    truncated: bool
    ids: list[int] | None
    """Sampled token ids; None for policies without tokens."""
    logprobs: list[float] | None
    observation: str | None
    """Tool result; None while it is not there yet, and after the last turn."""
    learner_version: int | None
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRecord:
    """The tokens of a whole episode, as the learner needs them."""

    ids: list[int]
    sampled: list[bool]
    """Whether the agent chose the token."""
    logprobs: list[float]
    """Of the sampling distribution; 0.0 on tokens that were fed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One submission."""

    episode_id: str
    idx: int
    job_hash: str | None
    """None when there was no parseable bundle."""
    accepted: bool
    problems: list[Any]
    """What the probe said, JSON."""
    job_id: str | None
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRecord:
    """What an episode was paid, term by term."""

    episode_id: str
    kind: str
    """seed or paired."""
    reward: float
    terms: dict[str, Any]
    at: float


class Episodes:
    """Episodes and what belongs to them."""

    def __init__(self, connection: Connection, events: EventLog, clock: Clock) -> None:
        self._connection = connection
        self._events = events
        self._clock = clock

    def start(
        self,
        episode_id: str,
        *,
        group_id: str,
        idx: int,
        family: str,
        policy: str,
        seed: int,
        learner_version: int | None = None,
    ) -> EpisodeRecord:
        """Record an episode before its first turn, or return what is known of it already."""
        with self._connection.transaction():
            cursor = self._connection.execute(
                "INSERT INTO episodes (id, group_id, idx, family, policy, seed, learner_version, "
                "state, started_at) VALUES (?, ?, ?, ?, ?, ?, ?, 'running', ?) "
                "ON CONFLICT (id) DO NOTHING",
                (
                    episode_id,
                    group_id,
                    idx,
                    family,
                    policy,
                    seed,
                    learner_version,
                    self._clock.now(),
                ),
            )
            if cursor.rowcount == 1:
                self._events.append("episode.started", episode_id, {"family": family})
            return self.get(episode_id)

    def add_turn(
        self,
        episode_id: str,
        idx: int,
        *,
        text: str,
        truncated: bool = False,
        ids: Sequence[int] | None = None,
        logprobs: Sequence[float] | None = None,
        learner_version: int | None = None,
    ) -> None:
        """Keep a turn of the agent, before anything acts on it."""
        with self._connection.transaction():
            cursor = self._connection.execute(
                "INSERT INTO turns (episode_id, idx, text, truncated, ids, logprobs, "
                "learner_version, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (
                    episode_id,
                    idx,
                    text,
                    int(truncated),
                    None if ids is None else pack_ids(ids),
                    None if logprobs is None else pack_floats(logprobs),
                    learner_version,
                    self._clock.now(),
                ),
            )
            if cursor.rowcount == 1:
                self._events.append("episode.turn", episode_id, {"idx": idx})

    def drop_turns(self, episode_id: str, from_idx: int) -> int:
        """Forget turns from `from_idx` on, and the answer they followed; how many there were."""
        with self._connection.transaction():
            dropped = self._connection.execute(
                "DELETE FROM turns WHERE episode_id = ? AND idx >= ?", (episode_id, from_idx)
            ).rowcount
            self._connection.execute(
                "UPDATE turns SET observation = NULL WHERE episode_id = ? AND idx = ?",
                (episode_id, from_idx - 1),
            )
            if dropped:
                self._events.append(
                    "episode.turns_dropped", episode_id, {"from": from_idx, "turns": dropped}
                )
        return dropped

    def restart(self, episode_id: str, *, learner_version: int | None) -> None:
        """Begin a running episode again with other weights; its turns are forgotten."""
        with self._connection.transaction():
            dropped = self.drop_turns(episode_id, 0)
            self._connection.execute(
                "UPDATE episodes SET learner_version = ? WHERE id = ? AND state = 'running'",
                (learner_version, episode_id),
            )
            data = {"learner_version": learner_version, "turns": dropped}
            self._events.append("episode.restarted", episode_id, data)

    def add_observation(self, episode_id: str, idx: int, observation: str) -> None:
        """Keep what the agent was told after turn `idx`."""
        with self._connection.transaction():
            cursor = self._connection.execute(
                "UPDATE turns SET observation = ? WHERE episode_id = ? AND idx = ? "
                "AND observation IS NULL",
                (observation, episode_id, idx),
            )
            if cursor.rowcount == 1:
                self._events.append("episode.observed", episode_id, {"idx": idx})

    def add_attempt(
        self,
        episode_id: str,
        idx: int,
        *,
        job_hash: str | None,
        accepted: bool,
        problems: Sequence[Any] = (),
        job_id: str | None = None,
    ) -> None:
        """Keep a submission and what the probe said."""
        with self._connection.transaction():
            cursor = self._connection.execute(
                "INSERT INTO attempts (episode_id, idx, job_hash, accepted, problems, job_id, at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (
                    episode_id,
                    idx,
                    job_hash,
                    int(accepted),
                    json.dumps(list(problems), allow_nan=False),
                    job_id,
                    self._clock.now(),
                ),
            )
            if cursor.rowcount == 1:
                self._events.append(
                    "episode.attempt", episode_id, {"idx": idx, "accepted": accepted}
                )

    def finish(
        self,
        episode_id: str,
        *,
        outcome: str,
        kind: str,
        reward: float,
        terms: Mapping[str, Any],
        summary: Mapping[str, Any] | None = None,
        trajectory: TrajectoryRecord | None = None,
    ) -> bool:
        """End an episode with its reward, all at once; False when it was over already."""
        with self._connection.transaction():
            if not self._end(episode_id, "finished", outcome, summary):
                return False
            self._connection.execute(
                "INSERT INTO rewards (episode_id, kind, reward, terms, at) VALUES (?, ?, ?, ?, ?)",
                (
                    episode_id,
                    kind,
                    reward,
                    json.dumps(dict(terms), allow_nan=False),
                    self._clock.now(),
                ),
            )
            if trajectory is not None:
                self._connection.execute(
                    "INSERT INTO trajectories (episode_id, num_tokens, ids, sampled, logprobs) "
                    "VALUES (?, ?, ?, ?, ?)",
                    (
                        episode_id,
                        len(trajectory.ids),
                        pack_ids(trajectory.ids),
                        pack_flags(trajectory.sampled),
                        pack_floats(trajectory.logprobs),
                    ),
                )
            self._events.append(
                "episode.finished", episode_id, {"outcome": outcome, "reward": reward}
            )
        return True

    def fail(self, episode_id: str, reason: str) -> bool:
        """End an episode that our side broke: no reward; False when it was over already."""
        with self._connection.transaction():
            if not self._end(episode_id, "failed", reason, None):
                return False
            self._events.append("episode.failed", episode_id, {"reason": reason})
        return True

    def get(self, episode_id: str) -> EpisodeRecord:
        """One episode; `StoreError` when there is none."""
        row = self._connection.one("SELECT * FROM episodes WHERE id = ?", (episode_id,))
        if row is None:
            raise StoreError(
                f"no episode {episode_id!r} in {self._connection.path}; expected one that was started"
            )
        return _episode(row)

    def all(self, *, group_id: str | None = None, state: str | None = None) -> list[EpisodeRecord]:
        """Episodes in the order they were started."""
        # One text per combination: `? IS NULL OR group_id = ?` would not use the index.
        asked = {"group_id": group_id, "state": state}
        given = {column: value for column, value in asked.items() if value is not None}
        where = " AND ".join(f"{column} = ?" for column in given) or "1"
        rows = self._connection.all(
            f"SELECT * FROM episodes WHERE {where} ORDER BY rowid",  # noqa: S608 (own columns)
            tuple(given.values()),
        )
        return [_episode(row) for row in rows]

    def num_turns(self, episode_id: str) -> int:
        """How many turns are recorded."""
        row = self._connection.one("SELECT count(*) FROM turns WHERE episode_id = ?", (episode_id,))
        return 0 if row is None else int(row[0])

    def turns(self, episode_id: str) -> list[TurnRecord]:
        """Turns so far, in order."""
        rows = self._connection.all(
            "SELECT * FROM turns WHERE episode_id = ? ORDER BY idx", (episode_id,)
        )
        return [_turn(row) for row in rows]

    def attempts(self, episode_id: str) -> list[AttemptRecord]:
        """Submissions so far, in order."""
        rows = self._connection.all(
            "SELECT * FROM attempts WHERE episode_id = ? ORDER BY idx", (episode_id,)
        )
        return [
            AttemptRecord(
                **{
                    **dict(row),
                    "accepted": bool(row["accepted"]),
                    "problems": json.loads(row["problems"]),
                }
            )
            for row in rows
        ]

    def reward(self, episode_id: str) -> RewardRecord | None:
        """What it was paid; None while it runs or when it failed."""
        row = self._connection.one("SELECT * FROM rewards WHERE episode_id = ?", (episode_id,))
        if row is None:
            return None
        return RewardRecord(**{**dict(row), "terms": json.loads(row["terms"])})

    def trajectory(self, episode_id: str) -> TrajectoryRecord | None:
        """Its tokens; None for policies without tokens."""
        row = self._connection.one("SELECT * FROM trajectories WHERE episode_id = ?", (episode_id,))
        if row is None:
            return None
        return TrajectoryRecord(
            ids=unpack_ids(row["ids"]),
            sampled=unpack_flags(row["sampled"]),
            logprobs=unpack_floats(row["logprobs"]),
        )

    def _end(
        self, episode_id: str, state: str, outcome: str, summary: Mapping[str, Any] | None
    ) -> bool:
        cursor = self._connection.execute(
            "UPDATE episodes SET state = ?, outcome = ?, finished_at = ?, summary = ? "
            "WHERE id = ? AND state = 'running'",
            (
                state,
                outcome,
                self._clock.now(),
                json.dumps(dict(summary or {}), allow_nan=False),
                episode_id,
            ),
        )
        return cursor.rowcount == 1


def _episode(row: Row) -> EpisodeRecord:
    fields = dict(row)
    fields["summary"] = json.loads(fields["summary"])
    return EpisodeRecord(**fields)


def _turn(row: Row) -> TurnRecord:
    fields = dict(row)
    fields["truncated"] = bool(fields["truncated"])
    fields["ids"] = None if fields["ids"] is None else unpack_ids(fields["ids"])
    fields["logprobs"] = None if fields["logprobs"] is None else unpack_floats(fields["logprobs"])
    return TurnRecord(**fields)
