"""Play scripted policies through a job's own rows, tools and rewards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from nestling.jobs.probe_policies import POLICIES, Lesson
from nestling.jobs.rollout_env import (
    CallRequest,
    FinalRequest,
    RolloutEnv,
    RolloutStart,
    ScoreRecord,
)

__all__ = ["Play", "ScriptedRollout", "play_policies"]

_CHARS_PER_TOKEN: Final = 7
"""Of the shipped models; a script has no tokens, and rubrics may count them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One policy on one row."""

    policy: str
    row: int
    score: ScoreRecord
    replies: tuple[str | None, ...]
    """What the tools answered, call by call; None where the task's own stop ended the rollout."""
    num_turns: int
    num_chars: int
    """Everything the rollout held: prompts, turns and replies."""
    turn_chars: int
    """What the policy wrote."""


class ScriptedRollout:
    """A rollout in progress: `call` is what it asks for next, None once its last turn is known."""

    def __init__(self, policy: str, lesson: Lesson, start: RolloutStart) -> None:
        self.policy = policy
        self.row = lesson.row.index
        self.call: CallRequest | None = None
        self._rollout_id = start.rollout_id
        self._script = POLICIES[policy](lesson)
        self._replies: list[str | None] = []
        self._num_chars = len(start.prompt) + len(start.system_prompt)
        self._turn_chars = 0
        self._num_turns = 1
        self._final = ""
        self._advance(None)

    def take(self, reply: str | None) -> None:
        """The answer to `call`."""
        self._replies.append(reply)
        if reply is None:
            self.call, self._final = None, ""
            return
        self._num_chars += len(reply)
        self._advance(reply)

    def final(self) -> FinalRequest:
        """The end of the rollout, to be scored."""
        return FinalRequest(
            rollout_id=self._rollout_id,
            text=self._final,
            stop="done",
            prompt_tokens=(self._num_chars - len(self._final)) // _CHARS_PER_TOKEN,
            completion_tokens=len(self._final) // _CHARS_PER_TOKEN,
        )

    def scored(self, score: ScoreRecord) -> Play:
        """The finished play."""
        return Play(
            policy=self.policy,
            row=self.row,
            score=score,
            replies=tuple(self._replies),
            num_turns=self._num_turns,
            num_chars=self._num_chars,
            turn_chars=self._turn_chars,
        )

    def _advance(self, reply: str | None) -> None:
        try:
            name, arguments, text = (
                next(self._script) if reply is None else self._script.send(reply)
            )
        except StopIteration as stop:
            self.call, self._final = None, str(stop.value)
            self._wrote(self._final)
            return
        self.call = CallRequest(
            rollout_id=self._rollout_id,
            text=text,
            name=name,
            arguments=arguments,
            prompt_tokens=self._num_chars // _CHARS_PER_TOKEN,
            completion_tokens=len(text) // _CHARS_PER_TOKEN,
        )
        self._num_turns += 1
        self._wrote(text)

    def _wrote(self, text: str) -> None:
        self._turn_chars += len(text)
        self._num_chars += len(text)


def play_policies(
    env: RolloutEnv, lessons: Sequence[Lesson], *, order: random.Random | None = None
) -> dict[tuple[str, int], Play]:
    """Every policy on every row, all at once in lock-step; `order` shuffles starts and scoring.

    Raises:
        JailError: from the environment.
    """
    jobs = [(policy, lesson) for lesson in lessons for policy in POLICIES]
    if order is not None:
        order.shuffle(jobs)
    starts = env.reset([lesson.row.index for _, lesson in jobs])
    running = [
        ScriptedRollout(policy, lesson, start)
        for (policy, lesson), start in zip(jobs, starts, strict=True)
    ]
    _play_calls(env, running)
    if order is not None:
        order.shuffle(running)
    scores = env.score([one.final() for one in running])
    return {
        (one.policy, one.row): one.scored(score) for one, score in zip(running, scores, strict=True)
    }


def _play_calls(env: RolloutEnv, running: Sequence[ScriptedRollout]) -> None:
    waiting = [(one, one.call) for one in running if one.call is not None]
    while waiting:
        replies = env.step([call for _, call in waiting])
        for (one, _), reply in zip(waiting, replies, strict=True):
            one.take(reply)
        waiting = [(one, one.call) for one, _ in waiting if one.call is not None]
