"""Requests hold to what vLLM documents; replies of any shape become turns."""

from __future__ import annotations

from typing import Any

import pytest

from nestling.core.errors import JobFailedError
from nestling.engine.chat import FinalAnswer, MalformedCall, ToolCall, parse_turn
from nestling.inner.openai_request import AskedTurn, answer_messages, read_turn, turn_body

from .vllm_fields import FIELDS, OF_OPENAI, problems

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 2}'}}


def completion(content: str | None, *calls: dict[str, Any], finish: str = "stop") -> dict[str, Any]:
    message = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5},
    }


def asked(*messages: dict[str, Any], tools: tuple[dict[str, Any], ...] = (TOOL,)) -> AskedTurn:
    return AskedTurn(messages=messages, tools=tools, max_tokens=96, seed=2**63 - 1)


def test_every_field_is_documented_and_none_is_forgotten() -> None:
    history = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    turn = read_turn(completion(None, CALL))
    again = [*history, turn.message, *answer_messages(turn, "42")]
    for messages in (history, again):
        body = turn_body(asked(*messages), model="m", temperature=0.0, extensions=True)
        assert problems(body) == []
        assert set(body) == set(FIELDS)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "42"}


def test_without_extensions_only_fields_of_openai_are_sent() -> None:
    user = {"role": "user", "content": "u"}
    body = turn_body(asked(user), model="m", temperature=1.0, extensions=False)
    assert set(body) == OF_OPENAI
    plain = turn_body(asked(user, tools=()), model="m", temperature=1.0, extensions=False)
    assert set(body) - set(plain) == {"tools", "tool_choice"}


def test_structured_call_is_the_turn_that_the_model_wrote() -> None:
    turn = read_turn(completion("I look. ", CALL))
    assert turn.parsed == ToolCall(name="look", arguments={"at": 2}, text_before="I look. ")
    assert parse_turn(turn.text) == turn.parsed
    assert turn.completion_tokens == 5


def test_call_in_the_text_is_read_there() -> None:
    text = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    turn = read_turn(completion(text))
    assert isinstance(turn.parsed, ToolCall)
    assert turn.text == text
    (answer,) = answer_messages(turn, "42")
    assert answer == {"role": "user", "content": "<tool_response>\n42\n</tool_response>"}


@pytest.mark.parametrize(
    "calls",
    [
        [CALL, CALL],
        [{**CALL, "function": {"name": "look", "arguments": "{"}}],
        [{**CALL, "function": {"name": "look", "arguments": "[1]"}}],
        [{**CALL, "function": {"name": "look", "arguments": '{"at": 1e999}'}}],
    ],
    ids=["two", "half", "list", "infinite"],
)
def test_call_that_is_none_is_malformed(calls: list[dict[str, Any]]) -> None:
    turn = read_turn(completion(None, *calls))
    assert isinstance(turn.parsed, MalformedCall)
    assert len(answer_messages(turn, "error")) == len(calls)


def test_cut_turn_is_told_from_a_finished_one() -> None:
    turn = read_turn(completion("ANSWER", finish="length"))
    assert turn.truncated
    assert turn.parsed == FinalAnswer(text="ANSWER")
    assert not read_turn(completion("ANSWER: 1")).truncated


@pytest.mark.parametrize("value", [{}, {"choices": []}, {"choices": [{"message": 3}]}])
def test_reply_that_is_no_completion_is_told(value: dict[str, Any]) -> None:
    with pytest.raises(JobFailedError) as caught:
        read_turn(value)
    assert caught.value.reason == "scorer.protocol"
