"""Judge a rubric and its tools by what scripted policies met."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from nestling.core.errors import Problem
from nestling.jobs.probe_policies import ORACLE
from nestling.jobs.scripted_rollouts import Play

__all__ = ["HIGHEST_REWARD", "LOWEST_REWARD", "SAME_REWARD", "rubric_problems", "same_replies"]

LOWEST_REWARD: Final = -10.0
HIGHEST_REWARD: Final = 10.0

SAME_REWARD: Final = 1e-9
"""Rewards closer than this are the same."""

_FRAMEWORK_PREFIX: Final = re.compile(r"^TaskError: task \w+ scoring: ")
_ADDRESS: Final = re.compile(r"0x[0-9a-f]{6,}")
_MARGIN: Final = 0.01
"""Share of the whole spread by which the right answer must lead."""


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
    if any(abs(plays[key].score.reward - again[key].score.reward) > SAME_REWARD for key in plays):
        problems.append(
            _rubric(
                "order",
                "the same rollouts got other rewards in another order",
                "a reward that depends on its own rollout alone",
                "keep no state outside trace.state",
            )
        )
    elif not all(same_replies(plays[key].replies, again[key].replies) for key in plays):
        problems.append(
            _rubric(
                "replies",
                "the same tool calls got other answers in another order",
                "tools that depend on their own rollout alone",
                "keep no state outside trace.state",
            )
        )
    rewards = [record.reward for record in records]
    spread = max(rewards) - min(rewards)
    if spread <= SAME_REWARD:
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


def same_replies(replies: Sequence[str | None], others: Sequence[str | None]) -> bool:
    """Whether tools answered alike; where objects lie in memory does not count."""
    return [_plain(text) for text in replies] == [_plain(text) for text in others]


def _plain(text: str | None) -> str | None:
    return None if text is None else _ADDRESS.sub("0x", text)


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
