"""Which hidden items a model got right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from sqlite3 import Row

from nestling.core.clock import Clock
from nestling.store.blobs import pack_flags, unpack_flags
from nestling.store.connection import Connection
from nestling.store.events import EventLog

__all__ = ["ScoreRecord", "Scores"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRecord:
    """One model on one hidden set."""

    phase: str
    """baseline, pre or post."""
    family: str
    split: str
    base_model: str
    model_hash: str
    job_id: str | None
    correct: list[bool]
    """Item by item, in the order of the set."""
    at: float

    @property
    def mean(self) -> float:
        """Share of items right."""
        return sum(self.correct) / len(self.correct)


class Scores:
    """Append-only; scoring the same model on the same set again keeps the first score."""

    def __init__(self, connection: Connection, events: EventLog, clock: Clock) -> None:
        self._connection = connection
        self._events = events
        self._clock = clock

    def add(
        self,
        phase: str,
        *,
        family: str,
        split: str,
        base_model: str,
        model_hash: str,
        correct: Sequence[bool],
        job_id: str | None = None,
    ) -> None:
        """Keep a score of at least one item."""
        with self._connection.transaction():
            cursor = self._connection.execute(
                "INSERT INTO scores (phase, family, split, base_model, model_hash, job_id, "
                "num_items, num_correct, correct, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO NOTHING",
                (
                    phase,
                    family,
                    split,
                    base_model,
                    model_hash,
                    job_id,
                    len(correct),
                    sum(correct),
                    pack_flags(correct),
                    self._clock.now(),
                ),
            )
            if cursor.rowcount == 1:
                self._events.append(
                    f"score.{phase}", job_id or model_hash, {"family": family, "split": split}
                )

    def all(
        self, *, phase: str | None = None, family: str | None = None, job_id: str | None = None
    ) -> list[ScoreRecord]:
        """Scores in the order they were kept."""
        rows = self._connection.all(
            "SELECT phase, family, split, base_model, model_hash, job_id, correct, at FROM scores "
            "WHERE (?1 IS NULL OR phase = ?1) AND (?2 IS NULL OR family = ?2) "
            "AND (?3 IS NULL OR job_id = ?3) ORDER BY id",
            (phase, family, job_id),
        )
        return [_score(row) for row in rows]


def _score(row: Row) -> ScoreRecord:
    return ScoreRecord(**{**dict(row), "correct": unpack_flags(row["correct"])})
