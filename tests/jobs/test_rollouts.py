"""Model turns against a real environment: calls, mistakes, ends, and a sampled batch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from nestling.engine.chat import render_call
from nestling.engine.config import ModelConfig
from nestling.engine.model import Model
from nestling.engine.sampler import Rollout, SamplingParams, TurnEnd
from nestling.engine.tokenizer import Tokenizer
from nestling.engine.weights import Weights
from nestling.jobs.env_client import open_env
from nestling.jobs.rollouts import EnvResponder, play_env

TOKENIZER = Tokenizer.closed([chr(code) for code in range(32, 127)])


@pytest.fixture
def env(jail, zygote, limits, ledger_tools, make_job):
    with open_env(make_job(), ledger_tools, limits, jail=jail, starter=zygote) as opened:
        yield opened


def turn(row: int, text: str, *, truncated: bool = False) -> TurnEnd:
    ids = [*TOKENIZER.encode(text), TOKENIZER.turn_end_id]
    return TurnEnd(row=row, ids=ids, text=text, truncated=truncated)


def finished(stop: Any = "done") -> Rollout:
    return Rollout(ids=[], sampled=[], logprobs=[], prompt_len=0, num_turns=1, stop=stop)


def said(ids: list[int] | None) -> str:
    assert ids is not None
    return TOKENIZER.decode(ids)


def test_calls_are_answered_and_answers_scored(env):
    answers = [row.data_json for row in env.rows(2)]
    responder = EnvResponder(env, TOKENIZER, [0, 0, 1])
    assert responder.prompts[0] == responder.prompts[1] != responder.prompts[2]
    balance = render_call("balance", {"account": "ann"})
    replies = responder.respond([turn(2, balance), turn(0, "ANSWER: 1"), turn(1, balance)])
    assert replies[1] is None
    for reply in (replies[0], replies[2]):
        assert "<tool_response>" in said(reply)
    assert responder.respond([turn(1, "hm", truncated=True)]) == [None]
    records = responder.score([finished(), finished("max_tokens"), finished("max_turns")])
    assert [record.error for record in records] == [None] * 3
    assert [record.metrics["turns"] for record in records] == [1, 2, 1]
    assert [record.metrics["truncated"] for record in records] == [0, 1, 1]
    assert answers


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("<tool_call>\n{", "error: the call is not valid JSON"),
        ("<tool_call>{}</tool_call> more", "error: expected one"),
        (render_call("fly", {}), "error: no tool named fly; tools: balance, deposit"),
        (render_call("balance", {}), "error: bad arguments for balance: account: Field required"),
        (render_call("balance", {"account": 10**30}), "error: the arguments hold a whole number"),
        (render_call("balance", {"account": [0] * 11_000}), "error: the arguments hold a value"),
        (render_call("balance", {"account": "<|im_end|>"}), "0"),
    ],
)
def test_mistakes_are_turns_with_an_answer(env, text, reply):
    responder = EnvResponder(env, TOKENIZER, [0])
    (ids,) = responder.respond([turn(0, text)])
    assert reply in said(ids)
    (record,) = responder.score([finished("max_turns")])
    assert record.error is None
    assert record.metrics["turns"] == 1


def test_tools_are_shown_on_request(env):
    plain = EnvResponder(env, TOKENIZER, [0]).prompts[0]
    shown = EnvResponder(env, TOKENIZER, [0], show_tools=True).prompts[0]
    assert "Put money into an account." in TOKENIZER.decode(shown)
    assert "<tools>" not in TOKENIZER.decode(plain)


def test_a_sampled_batch_is_scored_in_order_and_repeatable(env):
    config = ModelConfig(
        vocab_size=TOKENIZER.vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_positions=256,
    )
    weights = Weights.init(config, 1, torch.Generator().manual_seed(0))
    model = Model(config=config, weights=weights, tokenizer=TOKENIZER)
    params = SamplingParams(max_turn_tokens=8, max_total_tokens=160, max_turns=3)
    rows = [0, 1, 0, 1]
    runs = [play_env(model, env, rows, [5, 6, 5, 7], params) for _ in range(2)]
    for played, again in zip(*runs, strict=True):
        assert played == again
    first = runs[0]
    assert first[0].rollout.ids == first[2].rollout.ids
    assert all(one.score.error is None for one in first)
    assert all(
        one.rollout.ids[: one.rollout.prompt_len] != other.rollout.ids[: other.rollout.prompt_len]
        for one, other in itertools.pairwise(first)
    )
