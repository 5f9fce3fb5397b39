"""A job's environment as a trainer dares to use it: within a deadline, and no oversized prompt.

A probe sees a few rows once; what the job serves in training is checked again here, because a
prompt of megabytes would take the trainer's memory, not the jail's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from nestling.core.clock import Clock
from nestling.core.errors import JobFailedError
from nestling.engine.tokenizer import Tokenizer
from nestling.jobs.rollout_env import (
    CallRequest,
    FinalRequest,
    RolloutEnv,
    RolloutStart,
    Row,
    ScoreRecord,
)

__all__ = ["Deadline", "GuardedEnv"]

_MAX_CHARS_PER_TOKEN: Final = 32
"""Above the longest token of any vocabulary in use."""


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


class GuardedEnv:
    """Passes every call on while there is time left; satisfies `RolloutEnv`.

    Raises:
        JobFailedError: past the deadline, or `env.prompt_too_long` for a rollout whose prompt
            leaves no room in `max_total_tokens`.
    """

    def __init__(
        self, env: RolloutEnv, deadline: Deadline, tokenizer: Tokenizer, max_total_tokens: int
    ) -> None:
        self._env = env
        self._deadline = deadline
        self._tokenizer = tokenizer
        self._max_total_tokens = max_total_tokens

    def rows(self, limit: int) -> list[Row]:
        self._deadline.check()
        return self._env.rows(limit)

    def tool_schemas(self) -> list[dict[str, Any]]:
        self._deadline.check()
        return self._env.tool_schemas()

    def reset(self, rows: Sequence[int]) -> list[RolloutStart]:
        self._deadline.check()
        starts = self._env.reset(rows)
        for system_prompt, prompt in {(start.system_prompt, start.prompt) for start in starts}:
            self._check_prompt(system_prompt, prompt)
        return starts

    def step(self, calls: Sequence[CallRequest]) -> list[str | None]:
        self._deadline.check()
        return self._env.step(calls)

    def score(self, finals: Sequence[FinalRequest]) -> list[ScoreRecord]:
        self._deadline.check()
        return self._env.score(finals)

    def close(self) -> None:
        self._env.close()

    def _check_prompt(self, system_prompt: str, prompt: str) -> None:
        limit = self._max_total_tokens
        num_chars = len(system_prompt) + len(prompt)
        # Counting tokens takes time as well, so what is certainly too long is not even tokenized.
        fits = num_chars <= limit * _MAX_CHARS_PER_TOKEN and (
            len(self._tokenizer.encode(system_prompt)) + len(self._tokenizer.encode(prompt)) < limit
        )
        if not fits:
            raise JobFailedError(
                "env.prompt_too_long",
                f"a prompt of {num_chars} characters does not fit into seq_len = {limit} tokens; "
                "shorten the rows or raise seq_len",
            )
