"""Hold a job in training to what it did in the probe.

A second worker, the reference, is started and asked as a probe starts and asks one. Scripted
policies play rows in it that the probe did not play; the rubric must judge them as it judged the
probe's. In training every batch carries the same plays of one of those rows, mixed into its own
frames, and some of its real rollouts are played again in the reference. Rows, tool schemas, tool
answers and rewards must agree, so a job that tells the two apart (by limits, time, number of calls
or rows) gives itself away at the first batch in which that shows.

Reason codes: `env.changed_row`, `env.changed_tools`, `env.changed_rubric` (training differs from
the reference) and `env.uneven_rubric` (rows the probe did not play are judged by other rules).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from nestling.core.errors import JobFailedError, Problem
from nestling.core.seeds import derive_seed, stream
from nestling.engine.tokenizer import Tokenizer
from nestling.families import vocabulary
from nestling.families.family import Family
from nestling.jobs.probe import MAX_ROWS, played_rows
from nestling.jobs.probe_policies import POLICIES, Lesson, lesson_of, most_common_answer
from nestling.jobs.probe_report import clip_line
from nestling.jobs.probe_rubric import SAME_REWARD, rubric_problems, same_replies
from nestling.jobs.rollout_env import (
    CallRequest,
    FinalRequest,
    RolloutEnv,
    RolloutStart,
    Row,
    ScoreRecord,
)
from nestling.jobs.scripted_rollouts import Play, ScriptedRollout, play_policies
from nestling.jobs.token_count import TokenCount

__all__ = ["SpotChecks"]

T = TypeVar("T")

_NUM_LESSONS: Final = 8
"""Rows that the scripted policies play; each batch carries one of them in turn."""
_NUM_REPLAYED: Final = 2
"""Real rollouts of each batch that the reference plays again."""


@dataclass(slots=True, kw_only=True)
class _Recorded:
    """A real rollout that will be played again."""

    row: int
    calls: list[CallRequest] = field(default_factory=list)
    replies: list[str | None] = field(default_factory=list)
    final: FinalRequest | None = None
    score: ScoreRecord | None = None


class SpotChecks:
    """The environment of a training run with its reference beside it; satisfies `RolloutEnv`.

    Ask for rows first: whenever there are more of them the reference is played. `seed` should be out of the job's
    reach, as it decides which rows and rollouts are looked at; it changes no result. `tokenizer` is that of the model
    in training; None: of the shipped ones.

    Raises:
        JobFailedError: with one of the reason codes above.
        JailError: from either environment.
    """

    def __init__(
        self,
        env: RolloutEnv,
        reference: RolloutEnv,
        family: Family,
        seed: int,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._env = env
        self._reference = reference
        self._family = family
        self._seed = seed
        self._tokenizer = tokenizer or vocabulary.tokenizer()
        self._tokens = TokenCount(self._tokenizer, ())
        self._rng = stream(seed, "spot checks")
        self._rows: list[Row] = []
        """Of the reference."""
        self._num_trained = 0
        self._lessons: list[Lesson] = []
        self._expected: dict[tuple[str, int], Play] = {}
        self._num_batches = 0
        self._open: set[int] = set()
        """Real rollouts that are not scored yet."""
        self._scripted: list[ScriptedRollout] = []
        self._recorded: dict[int, _Recorded] = {}

    def rows(self, limit: int) -> list[Row]:
        """See `RolloutEnv`."""
        rows = self._env.rows(limit)
        if not self._rows:
            self._rows = self._reference.rows(MAX_ROWS + 1)
        self._compare_rows(rows)
        if len(rows) > self._num_trained:
            self._num_trained = len(rows)
            self._play_reference()
        return rows

    def tool_schemas(self) -> list[dict[str, Any]]:
        """See `RolloutEnv`."""
        return self._env.tool_schemas()

    def reset(self, rows: Sequence[int]) -> list[RolloutStart]:
        """See `RolloutEnv`; one row's scripted plays start among these."""
        if not self._lessons:
            return self._env.reset(rows)
        lesson = self._lessons[self._num_batches % len(self._lessons)]
        self._num_batches += 1
        wanted = [*rows, *[lesson.row.index] * len(POLICIES)]
        order = self._shuffled(len(wanted))
        placed = _in_place(order, self._env.reset([wanted[i] for i in order]))
        starts, extra = placed[: len(rows)], placed[len(rows) :]
        self._scripted += [
            ScriptedRollout(policy, lesson, start, self._tokens)
            for policy, start in zip(POLICIES, extra, strict=True)
        ]
        self._open |= {start.rollout_id for start in starts}
        for place in self._rng.sample(range(len(rows)), min(_NUM_REPLAYED, len(rows))):
            self._recorded[starts[place].rollout_id] = _Recorded(row=rows[place])
        return starts

    def step(self, calls: Sequence[CallRequest]) -> list[str | None]:
        """See `RolloutEnv`."""
        waiting = [(one, one.call) for one in self._scripted if one.call is not None]
        wanted = [*calls, *[call for _, call in waiting]]
        order = self._shuffled(len(wanted))
        placed = _in_place(order, self._env.step([wanted[i] for i in order]))
        answers, extra = placed[: len(calls)], placed[len(calls) :]
        for (one, _), reply in zip(waiting, extra, strict=True):
            one.take(reply)
        for call, answer in zip(calls, answers, strict=True):
            recorded = self._recorded.get(call.rollout_id)
            if recorded is not None:
                recorded.calls.append(call)
                recorded.replies.append(answer)
        return answers

    def score(self, finals: Sequence[FinalRequest]) -> list[ScoreRecord]:
        """See `RolloutEnv`; what was played beside the batch is compared here."""
        self._open -= {final.rollout_id for final in finals}
        if not self._open:
            while any(one.call is not None for one in self._scripted):
                self.step([])
        ready = [one for one in self._scripted if one.call is None]
        self._scripted = [one for one in self._scripted if one.call is not None]
        wanted = [*finals, *[one.final() for one in ready]]
        order = self._shuffled(len(wanted))
        placed = _in_place(order, self._env.score([wanted[i] for i in order]))
        scores, extra = placed[: len(finals)], placed[len(finals) :]
        for one, score in zip(ready, extra, strict=True):
            self._compare_play(one.scored(score))
        done = []
        for final, score in zip(finals, scores, strict=True):
            recorded = self._recorded.pop(final.rollout_id, None)
            if recorded is not None:
                recorded.final, recorded.score = final, score
                done.append(recorded)
        self._replay(done)
        return scores

    def close(self) -> None:
        """See `RolloutEnv`."""
        with ExitStack() as stack:
            stack.callback(self._reference.close)
            self._env.close()

    def _play_reference(self) -> None:
        """Play rows that the probe did not, among those that training will use."""
        probed = set(played_rows(len(self._rows)))
        fresh = [index for index in range(self._num_trained) if index not in probed]
        candidates = fresh or list(range(self._num_trained))
        chosen = self._rng.sample(candidates, min(_NUM_LESSONS, len(candidates)))
        schemas = self._reference.tool_schemas()
        if schemas != self._env.tool_schemas():
            raise _failed(
                "env.changed_tools", "the tools have other schemas in training", _SAME_TOOLS
            )
        self._lessons = self._lessons_of(chosen, schemas)
        self._tokens = TokenCount(self._tokenizer, schemas)
        plays = play_policies(self._reference, self._lessons, self._tokens)
        self._expected |= plays
        problems = self._problems(self._lessons, plays)
        if problems and not self._was_refused_anyway(schemas):
            raise _failed(
                "env.uneven_rubric",
                f"on rows that the probe did not play {problems[0].wrong}",
                problems[0].expected,
            )

    def _was_refused_anyway(self, schemas: list[dict[str, Any]]) -> bool:
        """Whether the probe's own rows show the same: then this job was never probed."""
        lessons = self._lessons_of(played_rows(len(self._rows)), schemas)
        plays = play_policies(self._reference, lessons, self._tokens)
        return bool(self._problems(lessons, plays))

    def _lessons_of(self, chosen: Sequence[int], schemas: list[dict[str, Any]]) -> list[Lesson]:
        common = most_common_answer(self._rows)
        return [
            lesson_of(
                self._rows[index], self._family, schemas, common, derive_seed(self._seed, index)
            )
            for index in chosen
        ]

    @staticmethod
    def _problems(lessons: Sequence[Lesson], plays: dict[tuple[str, int], Play]) -> list[Problem]:
        has_oracle = all(lesson.answer is not None for lesson in lessons)
        return rubric_problems(plays, plays, has_oracle=has_oracle)

    def _compare_rows(self, rows: Sequence[Row]) -> None:
        known = self._rows[: len(rows)]
        if list(rows) == known:
            return
        changed = next(
            (row.index for row, other in zip(rows, known, strict=False) if row != other), len(known)
        )
        raise _failed(
            "env.changed_row",
            f"row {changed} is another in training than in the probe",
            "the same rows at every start",
            "draw rows from random.Random(self.config.seed)",
        )

    def _compare_play(self, play: Play) -> None:
        expected = self._expected[play.policy, play.row]
        what = f"{play.policy} on row {play.row}"
        _compare(what, play.replies, play.score, expected.replies, expected.score)

    def _replay(self, recorded: Sequence[_Recorded]) -> None:
        """Play real rollouts again where the job believes itself in a probe."""
        if not recorded:
            return
        starts = self._reference.reset([one.row for one in recorded])
        replies: list[list[str | None]] = [[] for _ in recorded]
        for turn in range(max(len(one.calls) for one in recorded)):
            there = [k for k, one in enumerate(recorded) if turn < len(one.calls)]
            calls = [
                replace(recorded[k].calls[turn], rollout_id=starts[k].rollout_id) for k in there
            ]
            for k, reply in zip(there, self._reference.step(calls), strict=True):
                replies[k].append(reply)
        finals = []
        for start, one in zip(starts, recorded, strict=True):
            assert one.final is not None
            finals.append(replace(one.final, rollout_id=start.rollout_id))
        scores = self._reference.score(finals)
        for one, others, score in zip(recorded, replies, scores, strict=True):
            assert one.score is not None
            _compare(f"a rollout of row {one.row}", one.replies, one.score, others, score)

    def _shuffled(self, count: int) -> list[int]:
        """A random order, so that a place in a batch tells nothing."""
        order = list(range(count))
        self._rng.shuffle(order)
        return order


_SAME_TOOLS: Final = "the same answers as in the probe"
_NO_STATE: Final = "keep no state, clock or count outside trace.state"


def _compare(
    what: str,
    replies: Sequence[str | None],
    score: ScoreRecord,
    expected_replies: Sequence[str | None],
    expected: ScoreRecord,
) -> None:
    if not same_replies(replies, expected_replies):
        raise _failed(
            "env.changed_tools", f"tools answer {what} otherwise in training", _SAME_TOOLS
        )
    if abs(score.reward - expected.reward) > SAME_REWARD or (score.error is None) != (
        expected.error is None
    ):
        raise _failed(
            "env.changed_rubric",
            f"{what} earns {_earned(score)} in training, {_earned(expected)} in the probe",
            "the same reward",
        )


def _earned(score: ScoreRecord) -> str:
    return "an error" if score.error is not None else f"{score.reward:.3g}"


def _failed(reason: str, wrong: str, expected: str, fix: str = _NO_STATE) -> JobFailedError:
    problem = Problem(stage="training", code=reason, wrong=wrong, expected=expected, fix=fix)
    return JobFailedError(reason, clip_line(problem.line()))


def _in_place(order: Sequence[int], answers: Sequence[T]) -> list[T]:
    """Answers to requests sent in this order, back in the order of the requests."""
    places = dict(zip(order, answers, strict=True))
    return [places[index] for index in range(len(order))]
