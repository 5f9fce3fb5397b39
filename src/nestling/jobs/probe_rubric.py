"""Play scripted policies through a job's own rows, tools and rewards, and judge the rubric."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from nestling.core.errors import Problem
from nestling.jobs.probe_policies import ORACLE, POLICIES, Lesson, Script
from nestling.jobs.rollout_env import CallRequest, FinalRequest, RolloutEnv, ScoreRecord

__all__ = ["HIGHEST_REWARD", "LOWEST_REWARD", "Play", "play_policies", "rubric_problems"]

LOWEST_REWARD: Final = -10.0
HIGHEST_REWARD: Final = 10.0

_FRAMEWORK_PREFIX: Final = re.compile(r"^TaskError: task \w+ scoring: ")
_SAME: Final = 1e-9
_MARGIN: Final = 0.01
"""Share of the whole spread by which the right answer must lead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One policy on one row."""

    policy: str
    row: int
    score: ScoreRecord
    num_turns: int
    num_chars: int
    """Everything the rollout held: prompts, turns and replies."""
    turn_chars: int
    """What the policy wrote."""


@dataclass(slots=True, kw_only=True)
class _Running:
    """A rollout in progress."""

    key: tuple[str, int]
    script: Script
    rollout_id: int
    num_chars: int
    turn_chars: int = 0
    num_turns: int = 1
    call: CallRequest | None = None
    final: str = ""

    def advance(self, reply: str | None, *, first: bool = False) -> None:
        """Send a reply to the script and keep what it does next."""
        try:
            name, arguments, text = next(self.script) if first else self.script.send(reply or "")
        except StopIteration as stop:
            self.call, self.final = None, str(stop.value)
            self._wrote(self.final)
            return
        self.call = CallRequest(
            rollout_id=self.rollout_id, text=text, name=name, arguments=arguments
        )
        self.num_turns += 1
        self._wrote(text)

    def _wrote(self, text: str) -> None:
        self.turn_chars += len(text)
        self.num_chars += len(text)


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
    running = []
    for (policy, lesson), start in zip(jobs, starts, strict=True):
        one = _Running(
            key=(policy, lesson.row.index),
            script=POLICIES[policy](lesson),
            rollout_id=start.rollout_id,
            num_chars=len(start.prompt) + len(start.system_prompt),
        )
        one.advance(None, first=True)
        running.append(one)
    _play_calls(env, running)
    if order is not None:
        order.shuffle(running)
    finals = [
        FinalRequest(rollout_id=one.rollout_id, text=one.final, stop="done") for one in running
    ]
    return {
        one.key: Play(
            policy=one.key[0],
            row=one.key[1],
            score=score,
            num_turns=one.num_turns,
            num_chars=one.num_chars,
            turn_chars=one.turn_chars,
        )
        for one, score in zip(running, env.score(finals), strict=True)
    }


def _play_calls(env: RolloutEnv, running: Sequence[_Running]) -> None:
    waiting = [one for one in running if one.call is not None]
    while waiting:
        replies = env.step([one.call for one in waiting if one.call is not None])
        for one, reply in zip(waiting, replies, strict=True):
            if reply is None:
                one.call, one.final = None, ""
                continue
            one.num_chars += len(reply)
            one.advance(reply)
        waiting = [one for one in waiting if one.call is not None]


def rubric_problems(
    plays: Mapping[tuple[str, int], Play],
    again: Mapping[tuple[str, int], Play],
    *,
    has_oracle: bool,
) -> list[Problem]:
    """What is wrong with a rubric, from two plays of the same policies in different order.

    Without an oracle (rows that carry no `answer`) only errors, range, order and spread are judged.
    """
    records = [play.score for play in plays.values()]
    failed = next((record.error for record in records if record.error is not None), None)
    if failed is not None:
        what = _FRAMEWORK_PREFIX.sub("", failed).partition("; expected ")[0][:84]
        return [_rubric("error", f"scoring failed: {what}", "a number", "correct the reward")]
    problems = []
    outside = next(
        (r.reward for r in records if not LOWEST_REWARD <= r.reward <= HIGHEST_REWARD), None
    )
    if outside is not None:
        problems.append(
            _rubric(
                "range",
                f"a reward is {outside:.3g}",
                f"{LOWEST_REWARD:g}..{HIGHEST_REWARD:g}",
                "scale it down",
            )
        )
    if any(abs(plays[key].score.reward - again[key].score.reward) > _SAME for key in plays):
        problems.append(
            _rubric(
                "order",
                "the same rollouts got other rewards in another order",
                "a reward that depends on its own rollout alone",
                "keep no state outside trace.state",
            )
        )
    rewards = [record.reward for record in records]
    spread = max(rewards) - min(rewards)
    if spread <= _SAME:
        problems.append(
            _rubric(
                "constant",
                f"every rollout gets reward {rewards[0]:.3g}",
                "right and wrong answers to differ",
                "compare with self.data.answer",
            )
        )
    elif has_oracle:
        problems += _ranking_problems(plays, spread)
    return problems


def _ranking_problems(plays: Mapping[tuple[str, int], Play], spread: float) -> list[Problem]:
    totals: dict[str, list[float]] = {}
    for play in plays.values():
        totals.setdefault(play.policy, []).append(play.score.reward)
    means = {policy: sum(values) / len(values) for policy, values in totals.items()}
    right = means.pop(ORACLE)
    rival = max(means, key=lambda policy: means[policy])
    if right > means[rival] + _MARGIN * spread:
        return []
    return [
        _rubric(
            "oracle",
            f"the correct answer does not beat the rest: {right:.2f}, {rival} {means[rival]:.2f}",
            "it to earn most",
            "reward equality with self.data.answer",
        )
    ]


def _rubric(code: str, wrong: str, expected: str, fix: str) -> Problem:
    return Problem(stage="rubric", code=f"rubric.{code}", wrong=wrong, expected=expected, fix=fix)
