"""Play scripted policies through a job's own rows, tools and rewards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from nestling.jobs.probe_policies import POLICIES, Lesson
from nestling.jobs.rollout_env import (
    CallRequest,
    FinalRequest,
    RolloutEnv,
    RolloutStart,
    ScoreRecord,
)
from nestling.jobs.token_count import TokenCount

__all__ = ["Play", "ScriptedRollout", "play_policies"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One policy on one row."""

    policy: str
    row: int
    score: ScoreRecord
    replies: tuple[str | None, ...]
    """What the tools answered, call by call; None where the task's own stop ended the rollout."""
    num_turns: int
    num_tokens: int
    """Everything the rollout held: prompts, turns and replies."""
    turn_tokens: int
    """What the policy wrote."""


class ScriptedRollout:
    """A rollout in progress: `call` is what it asks for next, None once its last turn is known.

    Its requests carry the token counts of a model that says the same words, so that no rubric can tell it from one.
    """

    def __init__(
        self, policy: str, lesson: Lesson, start: RolloutStart, tokens: TokenCount
    ) -> None:
        self.policy = policy
        self.row = lesson.row.index
        self.call: CallRequest | None = None
        self._rollout_id = start.rollout_id
        self._script = POLICIES[policy](lesson)
        self._tokens = tokens
        self._replies: list[str | None] = []
        self._num_tokens = tokens.opening(start.system_prompt, start.prompt)
        self._turn_tokens = 0
        self._num_turns = 1
        self._final: FinalRequest | None = None
        self._advance(None)

    def take(self, reply: str | None) -> None:
        """The answer to `call`."""
        self._replies.append(reply)
        if reply is None:
            self.call = None
            return
        self._num_tokens += self._tokens.reply(reply)
        self._advance(reply)

    def final(self) -> FinalRequest:
        """The end of the rollout, to be scored; without a last turn when the task's own stop ended it."""
        return self._final or FinalRequest(rollout_id=self._rollout_id, text="", stop="done")

    def scored(self, score: ScoreRecord) -> Play:
        """The finished play."""
        return Play(
            policy=self.policy,
            row=self.row,
            score=score,
            replies=tuple(self._replies),
            num_turns=self._num_turns,
            num_tokens=self._num_tokens,
            turn_tokens=self._turn_tokens,
        )

    def _advance(self, reply: str | None) -> None:
        try:
            name, arguments, text = (
                next(self._script) if reply is None else self._script.send(reply)
            )
        except StopIteration as stop:
            text = str(stop.value)
            self.call, self._final = (
                None,
                FinalRequest(
                    rollout_id=self._rollout_id,
                    text=text,
                    stop="done",
                    prompt_tokens=self._num_tokens,
                    completion_tokens=self._tokens.turn(text),
                ),
            )
        else:
            self._num_turns += 1
            self.call = CallRequest(
                rollout_id=self._rollout_id,
                text=text,
                name=name,
                arguments=arguments,
                prompt_tokens=self._num_tokens,
                completion_tokens=self._tokens.turn(text),
            )
        self._turn_tokens += self._tokens.turn(text)
        self._num_tokens += self._tokens.turn(text)


def play_policies(
    env: RolloutEnv,
    lessons: Sequence[Lesson],
    tokens: TokenCount,
    *,
    order: random.Random | None = None,
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
        ScriptedRollout(policy, lesson, start, tokens)
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
