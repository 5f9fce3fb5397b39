"""An environment that stops answering at a deadline, so that no rollout outlives its stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nestling.core.clock import Clock
from nestling.core.errors import JobFailedError
from nestling.jobs.rollout_env import (
    CallRequest,
    FinalRequest,
    RolloutEnv,
    RolloutStart,
    Row,
    ScoreRecord,
)

__all__ = ["Deadline", "TimedEnv"]


class Deadline:
    """A point on the monotonic clock and the reason code for passing it."""

    def __init__(self, clock: Clock, limit_s: float, reason: str) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._end_s = clock.monotonic() + limit_s
        self._reason = reason

    def check(self) -> None:
        """Raises `JobFailedError` once the time is over."""
        if self._clock.monotonic() > self._end_s:
            raise JobFailedError(self._reason, f"not finished after {self._limit_s:g} s")


class TimedEnv:
    """Passes every call on while there is time left; satisfies `RolloutEnv`."""

    def __init__(self, env: RolloutEnv, deadline: Deadline) -> None:
        self._env = env
        self._deadline = deadline

    def rows(self, limit: int) -> list[Row]:
        self._deadline.check()
        return self._env.rows(limit)

    def tool_schemas(self) -> list[dict[str, Any]]:
        self._deadline.check()
        return self._env.tool_schemas()

    def reset(self, rows: Sequence[int]) -> list[RolloutStart]:
        self._deadline.check()
        return self._env.reset(rows)

    def step(self, calls: Sequence[CallRequest]) -> list[str | None]:
        self._deadline.check()
        return self._env.step(calls)

    def score(self, finals: Sequence[FinalRequest]) -> list[ScoreRecord]:
        self._deadline.check()
        return self._env.score(finals)

    def close(self) -> None:
        self._env.close()
