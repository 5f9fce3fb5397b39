"""What a rubric is told of a scripted play is what it would be told of a model that said the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing

import pytest

from nestling.engine.sampler import Rollout, TurnEnd
from nestling.engine.tokenizer import Tokenizer
from nestling.families import vocabulary
from nestling.families.hidden_taskset import hidden_taskset
from nestling.families.registry import get
from nestling.jobs.probe_policies import POLICIES, Lesson, lesson_of
from nestling.jobs.rollout_env import CallRequest, FinalRequest, RolloutStart, Row, ScoreRecord
from nestling.jobs.rollouts import EnvResponder
from nestling.jobs.scripted_rollouts import Play, play_policies
from nestling.jobs.token_count import TokenCount
from nestling.jobs.verifiers_host import VerifiersHost

FAMILY = get("ledger")
LETTERS = [chr(code) for code in range(32, 127)]


class Listening:
    """An environment that remembers what it was asked, by rollout; with `stops` the first call ends each."""

    def __init__(self, *, stops: bool = False) -> None:
        rng = random.Random(0)
        self._host = VerifiersHost(hidden_taskset(FAMILY, [FAMILY.sample(rng, 2, 5)]))
        self._stops = stops
        self.asked: dict[int, list[CallRequest | FinalRequest]] = {}

    def rows(self, limit: int) -> list[Row]:
        return self._host.rows(limit)

    def tool_schemas(self) -> list[dict[str, object]]:
        return self._host.tool_schemas()

    def reset(self, rows: Sequence[int]) -> list[RolloutStart]:
        return self._host.reset(rows)

    def step(self, calls: Sequence[CallRequest]) -> list[str | None]:
        for call in calls:
            self.asked.setdefault(call.rollout_id, []).append(call)
        answers = self._host.step(calls)
        return [None] * len(answers) if self._stops else answers

    def score(self, finals: Sequence[FinalRequest]) -> list[ScoreRecord]:
        for final in finals:
            self.asked.setdefault(final.rollout_id, []).append(final)
        return self._host.score(finals)

    def close(self) -> None:
        self._host.close()


def scripted(tokenizer: Tokenizer, env: Listening) -> dict[tuple[str, int], Play]:
    (row,) = env.rows(1)
    schemas = tuple(env.tool_schemas())
    lesson: Lesson = lesson_of(row, FAMILY, schemas, "0", seed=1)
    return play_policies(env, [lesson], TokenCount(tokenizer, schemas))


def by_model(tokenizer: Tokenizer, env: Listening, texts: list[list[str]]) -> list[Rollout]:
    """A model says these texts, one list a rollout; its rollouts are as long as what it read and said."""
    responder = EnvResponder(env, tokenizer, [0] * len(texts))
    lengths = [len(prompt) for prompt in responder.prompts]
    for row, said in enumerate(texts):
        for text in said:
            ids = [*tokenizer.encode(text), tokenizer.turn_end_id]
            (answer,) = responder.respond([TurnEnd(row=row, ids=ids, text=text, truncated=False)])
            lengths[row] += len(ids) + len(answer or ())
    rollouts = [
        Rollout(
            ids=[0] * n,
            sampled=[True] * n,
            logprobs=[0.0] * n,
            prompt_len=0,
            num_turns=1,
            stop="done",
        )
        for n in lengths
    ]
    responder.score(rollouts)
    return rollouts


@pytest.mark.parametrize("stops", [False, True], ids=["to the end", "stopped by the task"])
@pytest.mark.parametrize(
    "tokenizer",
    [vocabulary.tokenizer(), Tokenizer.closed(LETTERS, glue=())],
    ids=["shipped", "shown its tools"],
)
def test_a_script_has_the_token_counts_of_a_model_that_says_the_same(
    tokenizer: Tokenizer, stops: bool
) -> None:
    with closing(Listening(stops=stops)) as env, closing(Listening(stops=stops)) as other:
        plays = scripted(tokenizer, env)
        texts = []
        for rollout in range(len(POLICIES)):
            *calls, final = env.asked[rollout]
            last = [] if stops and calls else [final.text]
            texts.append([*(call.text for call in calls), *last])
        rollouts = by_model(tokenizer, other, texts)
        assert env.asked == other.asked
        assert [play.num_tokens for play in plays.values()] == [len(one.ids) for one in rollouts]


def test_the_counts_follow_the_vocabulary() -> None:
    with closing(Listening()) as env:
        few = scripted(vocabulary.tokenizer(), env)
        many = scripted(Tokenizer.closed(LETTERS), env)
    assert all(
        few[key].turn_tokens < many[key].turn_tokens for key in few if few[key].turn_tokens > 1
    )
