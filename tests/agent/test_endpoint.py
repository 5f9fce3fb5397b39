"""Endpoints that behave, and many that do not."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.agent.episode import EpisodeTask, run_episode
from nestling.agent.episode_result import EpisodeResult
from nestling.agent.policies.endpoint import EndpointPolicy
from nestling.agent.policies.endpoint_budget import BudgetSpentError, TokenBudget, Usage
from nestling.agent.policies.endpoint_client import EndpointError
from nestling.agent.policies.endpoint_config import EndpointConfig, TokenPrices, read_endpoint
from nestling.agent.policies.endpoint_reply import EMPTY_TURN, read_reply, turn_message
from nestling.agent.policy import AgentTurn, ContextFullError
from nestling.agent.prompt import AgentPrompt
from nestling.agent.tool_schemas import TOOL_SCHEMAS
from nestling.bench.agents import read_agent
from nestling.core.errors import ConfigError
from nestling.engine.chat import MalformedCall, ToolCall, parse_turn, render_call
from nestling.families.registry import get

from .scripted_endpoint import Answer, Endpoint, call, endpoint, said

pytestmark = pytest.mark.long

PROMPT = AgentPrompt(system="s", user="u", tool_schemas=TOOL_SCHEMAS, style="full", family="ledger")
DONE = said("I am done.")


def config(url: str, **changes: Any) -> EndpointConfig:
    quick = {"wait_s": 0.001, "timeout_s": 20.0, "retries": 3, "temperature": 0.0}
    return EndpointConfig.model_validate({"url": url, "model": "m", **quick, **changes})


async def play(
    script: Sequence[Answer], runner, *, environment=None, **changes: Any
) -> tuple[EpisodeResult, Endpoint]:
    """One episode against a script."""
    with endpoint(script) as server:
        asked = config(server.url, **changes)
        async with EndpointPolicy.opened(asked, environment=environment or {}) as policy:
            task = EpisodeTask(family=get("ledger"), task_id="t", task_seed=1, policy_seed=2)
            return await run_episode(task, policy, runner), server


@pytest.mark.parametrize("text", [False, True], ids=["structured", "in the text"])
async def test_both_kinds_of_calls_play(runner, text: bool) -> None:
    script = [
        call("list_files", text=text),
        call("read_file", '{"path": "job.toml"}', text=text),
        DONE,
    ]
    result, server = await play(script, runner)
    assert [turn.tool for turn in result.turns[2:]] == ["list_files", "read_file", None]
    assert "TASK.md" in result.turns[2].result
    assert result.outcome_code == "no_call"
    assert result.turns[2].text == render_call("list_files", {})
    history = server.requests[2]["messages"]
    assert [one["role"] for one in history[:2]] == ["system", "user"]
    if text:
        assert history[2] == {"role": "assistant", "content": render_call("list_files", {})}
        assert history[3]["role"] == "user"
        assert history[3]["content"].startswith("<tool_response>\n")
    else:
        ids = [one["id"] for one in history[2]["tool_calls"]]
        assert [one["tool_call_id"] for one in history if one["role"] == "tool"][:1] == ids
        assert ids != [one["id"] for one in history[4]["tool_calls"]]
    assert [one["function"]["name"] for one in server.requests[0]["tools"]] == [
        one["function"]["name"] for one in TOOL_SCHEMAS
    ]
    assert server.requests[0]["seed"] != server.requests[1]["seed"]


BAD_TURNS = {
    "half JSON arguments": call("read_file", '{"path": "job'),
    "arguments of another type": call("read_file", "[1]"),
    "no name": call(None),
    "half a call in the text": said('<tool_call>\n{"name": "read_f'),
    "empty": said(""),
    "null": said(None),
    "no choices": Answer(body={"choices": []}),
    "choice of another type": Answer(body={"choices": ["x"]}),
    "another object": Answer(body={"hello": 1}),
    "list": Answer(body=[1]),
    "cut": said("I was going to", finish="length"),
    "two calls at once": said(
        tool_calls=[{"function": {"name": "list_files", "arguments": "{}"}}] * 2
    ),
    "half a surrogate pair": said(render_call("read_file", {"path": "\ud800"})),
}


@pytest.mark.parametrize("name", BAD_TURNS)
async def test_a_malformed_reply_is_a_turn_with_an_error(runner, name: str) -> None:
    result, server = await play([BAD_TURNS[name], call("list_files"), DONE], runner)
    bad, good = result.turns[2:4]
    assert bad.tool is None
    assert bad.result.startswith("error: ")
    assert (good.tool, result.outcome_code) == ("list_files", "no_call")
    assert not result.is_fault
    told = server.requests[1]["messages"][-1]
    assert "error: " in told["content"]
    result.model_dump_json()


@pytest.mark.parametrize(
    "answer",
    [
        call("delete_everything"),
        call("write_file", '{"path": 7}'),
        call("list_files", '{"x": 1}'),
        call("delete_everything", text=True),
    ],
)
async def test_a_wrong_tool_is_told(runner, answer: Answer) -> None:
    result, _ = await play([answer, DONE], runner)
    assert result.turns[2].result.startswith("error: ")
    assert result.outcome_code == "no_call"


async def test_malformed_replies_end_the_episode_in_time(runner) -> None:
    result, server = await play([said("")], runner)
    assert result.outcome_code == "malformed_calls"
    assert len(server.requests) == 3
    assert result.turns[2].text == EMPTY_TURN


@pytest.mark.parametrize(
    "trouble",
    [
        [Answer(status=500, body={})] * 3,
        [Answer(status=503, body=b"<html>"), Answer(status=429, body={})],
        [Answer(status=429, body={}, headers={"Retry-After": "0"})],
        [Answer(body=b'{"choices": [{"mess')],
        [Answer(body=b'{"choices"', cut=True)],
        [Answer(status=408, body={})],
    ],
    ids=["burst of 500", "503 and 429", "Retry-After", "half JSON", "cut off", "408"],
)
async def test_passing_trouble_is_waited_out(runner, trouble: list[Answer]) -> None:
    result, server = await play([*trouble, DONE], runner)
    assert result.outcome_code == "no_call"
    assert result.num_turns == 1
    assert len(server.requests) == len(trouble) + 1


async def test_a_slow_endpoint_is_asked_again(runner) -> None:
    result, server = await play([Answer(hang=True), DONE], runner, timeout_s=0.3)
    assert result.outcome_code == "no_call"
    assert len(server.requests) == 2


async def test_replies_that_never_are_json_become_malformed_turns(runner) -> None:
    result, server = await play([Answer(body=b"{")], runner, retries=1)
    assert result.outcome_code == "malformed_calls"
    assert len(server.requests) == 6


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        (Answer(status=500, body={"error": {"message": "boom"}}), "boom"),
        (Answer(status=401, body={"error": {"message": "who"}}), "MY_KEY"),
        (Answer(status=404, body={}), "model's name"),
        (Answer(status=429, body={}, headers={"Retry-After": "3600"}), "raise max_wait_s"),
        (Answer(status=302, body={}, headers={"Location": "http://127.0.0.1:9/"}), "302"),
        (Answer(hang=True), "no answer within"),
    ],
    ids=["500", "401", "404", "long wait", "redirect", "silent"],
)
async def test_a_dead_endpoint_is_a_fault_of_the_policy(runner, answer, detail) -> None:
    result, _ = await play([answer], runner, retries=1, timeout_s=0.5, key_env="MY_KEY")
    assert result.outcome_code == "policy_failed"
    assert result.is_fault
    assert detail in result.detail


async def test_nobody_listening_is_a_fault(runner) -> None:
    with endpoint([DONE]) as server:
        url = server.url
    async with EndpointPolicy.opened(config(url, retries=1), environment={}) as policy:
        task = EpisodeTask(family=get("ledger"), task_id="t", task_seed=1, policy_seed=2)
        result = await run_episode(task, policy, runner)
    assert result.outcome_code == "policy_failed"
    assert "ConnectError" in result.detail


async def test_retry_after_is_honoured() -> None:
    now = 1_000_000.0

    class Still:
        def now(self) -> float:
            return now

        def monotonic(self) -> float:
            return now

    late = format_datetime(datetime.fromtimestamp(now + 90, UTC), usegmt=True)
    for value, expected in (("1", None), (late, "asks to wait 90 s")):
        script = [Answer(status=429, body={}, headers={"Retry-After": value}), DONE]
        with endpoint(script) as server:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            async with EndpointPolicy.opened(
                config(server.url), environment={}, clock=Still()
            ) as policy:
                session = policy.begin(PROMPT, 1)
                if expected:
                    with pytest.raises(EndpointError, match=expected):
                        await session.act()
                else:
                    await session.act()
                    assert loop.time() - began_s >= 1


async def test_a_full_context_is_no_fault(runner) -> None:
    full = Answer(status=400, body={"error": {"code": "context_length_exceeded", "message": "m"}})
    result, _ = await play([call("list_files"), full], runner)
    assert result.outcome_code == "context_full"
    assert not result.is_fault


async def test_fields_that_an_endpoint_refuses_are_left_out(runner) -> None:
    refusals = [
        Answer(status=400, body={"error": {"message": "use max_completion_tokens instead"}}),
        Answer(status=400, body={"error": {"message": "seed is not supported"}}),
    ]
    result, server = await play([*refusals, call("list_files"), DONE], runner)
    assert result.outcome_code == "no_call"
    for request in server.requests[2:]:
        assert "seed" not in request
        assert "max_tokens" not in request
        assert request["max_completion_tokens"] == 4096
    assert len(server.requests) == 4


async def test_the_key_comes_from_the_environment_and_shows_nowhere(runner) -> None:
    refused = Answer(status=401, body={"error": {"message": "bad key sk-123"}})
    result, server = await play(
        [call("list_files"), refused], runner, key_env="MY_KEY", environment={"MY_KEY": "sk-123\n"}
    )
    assert server.headers[0]["authorization"] == "Bearer sk-123"
    assert "sk-123" not in result.model_dump_json()
    _, server = await play([DONE], runner, key_env="MY_KEY", environment={"OTHER": "x"})
    assert "authorization" not in server.headers[0]
    with pytest.raises(ConfigError, match="MY_KEY") as found:
        await play([DONE], runner, key_env="MY_KEY", environment={"MY_KEY": "a b"})
    assert "a b" not in str(found.value)


async def test_no_more_requests_at_once_than_allowed() -> None:
    gate = threading.Event()
    with endpoint([DONE], gate=gate) as server:
        async with (
            EndpointPolicy.opened(config(server.url, concurrency=2), environment={}) as policy,
            asyncio.TaskGroup() as group,
        ):
            for seed in range(6):
                group.create_task(policy.begin(PROMPT, seed).act())
            for _ in range(2):
                await asyncio.to_thread(server.arrived.acquire, timeout=20)
            gate.set()
    assert len(server.requests) == 6
    assert server.most_at_once == 2


async def test_caps_hold_before_money_is_spent(runner) -> None:
    turn = call("list_files", usage=(900, 100))
    result, server = await play([turn], runner, max_tokens=8000, max_turn_tokens=500)
    assert result.outcome_code == "policy_failed"
    assert "cap is 8000" in result.detail
    assert 2 <= len(server.requests) < 8
    prices = {"usd_in": 1.0, "usd_out": 10.0}
    result, server = await play([turn], runner, prices=prices, max_usd=0.02, max_turn_tokens=500)
    assert "USD; the cap is 0.02" in result.detail
    # Each turn costs 0.0019 USD and could have cost 0.005 for its text alone.
    assert 2 <= len(server.requests) <= 8


def test_budget_counts_what_is_under_way() -> None:
    budget = TokenBudget(max_tokens=100, prices=TokenPrices(usd_in=1, usd_out=2))
    half = Usage(tokens_in=40, tokens_out=10)
    first = budget.reserve(half)
    budget.reserve(half)
    with pytest.raises(BudgetSpentError):
        budget.reserve(Usage(tokens_out=1))
    budget.settle(first, Usage(tokens_in=1))
    budget.reserve(Usage(tokens_in=49))
    budget.settle(half, None)
    assert budget.used == Usage(tokens_in=41, tokens_out=10)
    assert budget.used_usd == pytest.approx(61e-6)


async def test_recorded_turns_are_taken_over(runner) -> None:
    texts = [render_call("list_files", {}), "<tool_call>\n{", EMPTY_TURN]
    with endpoint([DONE]) as server:
        async with EndpointPolicy.opened(config(server.url), environment={}) as policy:
            session = policy.begin(PROMPT, 1)
            for text in texts:
                turn = AgentTurn(text=text)
                assert await session.replay(turn) == turn
                await session.observe("answer")
            await session.act()
            session.close()
            assert await session.replay(AgentTurn(text="x")) is None
            with pytest.raises(ContextFullError):
                await session.act()
            assert session.trajectory() is None
    roles = [one["role"] for one in server.requests[0]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "user"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "message",
                    "content",
                    "tool_calls",
                    "function",
                    "name",
                    "arguments",
                    "id",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(value=JSON, as_message=st.booleans())
def test_any_reply_is_a_turn(value: Any, as_message: bool) -> None:
    reply = read_reply({"choices": [{"message": value}]} if as_message else value, 3)
    assert reply.text
    json.dumps(reply.message)
    parsed = parse_turn(reply.text)
    if reply.call_ids and len(reply.call_ids) == 1:
        assert isinstance(parsed, ToolCall)
    again = turn_message(reply.text, 3)
    assert again.text == reply.text


def test_thoughts_are_left_out_and_other_forms_read() -> None:
    def read(**message: Any) -> str:
        return read_reply({"choices": [{"message": message}]}, 0).text

    assert read(content="<think>a <tool_call></think>\n\nyes") == "yes"
    assert read(content=[{"type": "text", "text": "a"}, {"type": "image"}]) == "a"
    call_text = render_call("list_files", {})
    whole = {"function": {"name": "list_files", "arguments": {}}}
    assert read(content=None, tool_calls=[whole]) == call_text
    assert read(content=f"so {call_text}", tool_calls=[whole]) == f"so {call_text}"
    assert isinstance(parse_turn(EMPTY_TURN), MalformedCall)


def test_endpoints_are_named() -> None:
    found = read_endpoint(
        "http://localhost:8000/v1/#org/model:7b?temperature=0&style=compact&usd_in=1&usd_out=2"
        "&max_usd=0.5&key_env=MY_KEY"
    )
    assert (found.url, found.model) == ("http://localhost:8000/v1", "org/model:7b")
    assert (found.temperature, found.style, found.max_usd) == (0.0, "compact", 0.5)
    assert found.prices == TokenPrices(usd_in=1, usd_out=2)
    spec = read_agent("endpoint:http://localhost:8000/v1#org/model:7b")
    assert spec.arm.startswith("org-model-7b-")
    assert spec.folder is None
    other = read_agent("endpoint:http://localhost:8000/v1#org/model:7b?temperature=0")
    assert other.arm != spec.arm


@pytest.mark.parametrize(
    "text",
    [
        "http://x/v1",
        "ftp://x/v1#m",
        "http://x/v1#",
        "http://x/v1#m?temprature=0",
        "http://x/v1#m?temperature=9",
        "http://x/v1#m?max_usd=1",
        "http://me:pw@x/v1#m",
    ],
)
def test_wrong_endpoints_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as found:
        read_agent(f"endpoint:{text}")
    assert "expected" in str(found.value) or "password" in str(found.value)
    assert "pw" not in str(found.value)
