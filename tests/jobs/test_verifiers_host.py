"""The in-process host gives what the framework's own turn-by-turn path gives, much cheaper."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1 import graph
from verifiers.v1.mcp.server import _call_state
from verifiers.v1.state import state_cls
from verifiers.v1.trace import AgentInfo, ModelCall, TraceTask
from verifiers.v1.types import (
    AssistantMessage,
    Response,
    SystemMessage,
    ToolCall,
    ToolMessage,
    Usage,
    UserMessage,
)

from nestling.core.errors import JailError
from nestling.jobs.rollout_env import CallRequest, FinalRequest
from nestling.jobs.verifiers_host import VerifiersHost, load_taskset_from


@pytest.fixture
def host_of() -> Iterator[Any]:
    """Makes hosts and closes them."""
    hosts = []

    def made(taskset: Any) -> VerifiersHost:
        hosts.append(VerifiersHost(taskset))
        return hosts[-1]

    yield made
    for host in hosts:
        host.close()
        host.close()


@pytest.fixture
def load(tmp_path: Path, ledger_tools, make_job) -> Iterator[Any]:
    """Write a job, import it, and forget it afterwards."""

    def loaded(job: dict[str, bytes] | None = None, **env_args: Any) -> Any:
        files = dict(job if job is not None else make_job())
        files |= {f"tools/{name}": content for name, content in ledger_tools.items()}
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)
        return load_taskset_from(tmp_path, env_args)

    yield loaded
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]
    for name in [n for n in sys.modules if n.partition(".")[0] in ("environment", "tools")]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def load_source(host_of, load, make_job, ledger_taskset_source):
    """A host over the usual job with some of its text replaced."""

    def loaded(*replacements: tuple[str, str]) -> VerifiersHost:
        source = ledger_taskset_source
        for old, new in replacements:
            assert old in source
            source = source.replace(old, new)
        return host_of(load(make_job(source)))

    return loaded


def call(rollout_id: int, name: str, arguments: dict[str, Any], **more: Any) -> CallRequest:
    text = f"<tool_call>{json.dumps(arguments)}</tool_call>"
    return CallRequest(rollout_id=rollout_id, text=text, name=name, arguments=arguments, **more)


def answer(rollout_id: int, text: str) -> FinalRequest:
    return FinalRequest(rollout_id=rollout_id, text=text, stop="done")


def random_script(rng: random.Random, row: Any) -> tuple[list[CallRequest], FinalRequest]:
    """Calls, good and bad, and an end."""
    calls = []
    for _ in range(rng.randint(0, 6)):
        name = rng.choice(["deposit", "balance", "nothing"])
        arguments: dict[str, Any] = {"account": rng.choice(["ann", "bob"])}
        if name == "deposit":
            arguments["amount"] = rng.choice([1, 5, "7", "x", -1, int(row.prompt.split()[1])])
        calls.append(
            call(0, name, arguments, prompt_tokens=rng.randint(1, 99), completion_tokens=5)
        )
    stop = rng.choice(["done", "done", "max_turns", "max_tokens"])
    data = json.loads(row.data_json)
    text = "" if stop != "done" else rng.choice([f"ANSWER: {data['answer']}", "ANSWER: 0", ""])
    return calls, FinalRequest(rollout_id=0, text=text, stop=stop)


async def reference(task: Any, script: tuple[list[CallRequest], FinalRequest], answers: list[str]):
    """The framework's way: one prepared and committed turn per model turn, then task.score."""
    trace = vf.Trace(
        task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=AgentInfo(config=vf.AgentConfig()),
    )
    toolset = task.toolsets(task.config)[0]
    token = _call_state.set(trace.state)
    try:
        await toolset.setup_task(task.data)
        messages: list[Any] = [
            SystemMessage(content=task.data.system_prompt),
            UserMessage(content=task.data.prompt),
        ]

        def commit(message: Any, request: Any, finish: str) -> None:
            usage = Usage(
                prompt_tokens=request.prompt_tokens, completion_tokens=request.completion_tokens
            )
            turn = graph.prepare_turn(trace, list(messages), [])
            node = turn.commit(
                Response(
                    id="", created=0, model="m", message=message, finish_reason=finish, usage=usage
                )
            )
            trace.calls.append(ModelCall(node=node, model="m", finish_reason=finish, usage=usage))
            messages.append(message)

        calls, final = script
        for number, (request, text) in enumerate(zip(calls, answers, strict=True)):
            tool_call = ToolCall(
                id=f"c{number}", name=request.name, arguments=json.dumps(request.arguments)
            )
            commit(AssistantMessage(tool_calls=[tool_call]), request, "tool_calls")
            if request.name != "nothing":
                try:
                    arguments = dict(request.arguments)
                    if "amount" in arguments:
                        arguments["amount"] = int(arguments["amount"])
                    result = getattr(toolset, request.name)(**arguments)
                    result = await result if asyncio.iscoroutine(result) else result
                    assert str(result) == text
                except ValueError:
                    assert text.startswith("error: ")
            messages.append(ToolMessage(tool_call_id=f"c{number}", name=request.name, content=text))
        if final.stop == "done":
            commit(AssistantMessage(content=final.text), final, "stop")
            trace.stop("agent_completed")
        else:
            if not calls:
                trace.nodes += [
                    graph.MessageNode(message=messages[0]),
                    graph.MessageNode(parent=0, message=messages[1]),
                ]
            trace.stop("max_turns")
        await task.score(trace)
    finally:
        _call_state.reset(token)
    return trace


@pytest.mark.long
def test_rewards_and_metrics_equal_the_turn_by_turn_path(load, host_of):
    taskset = load()
    host = host_of(taskset)
    rows = host.rows(40)
    rng = random.Random(3)
    tasks = list(taskset)
    compared = 0
    for _ in range(3):
        for row, task in zip(rows, tasks, strict=True):
            script = random_script(rng, row)
            (start,) = host.reset([row.index])
            answers = []
            for request in script[0]:
                request = call(
                    start.rollout_id,
                    request.name,
                    request.arguments,
                    prompt_tokens=request.prompt_tokens,
                    completion_tokens=request.completion_tokens,
                )
                answers += host.step([request])
            final = FinalRequest(
                rollout_id=start.rollout_id, text=script[1].text, stop=script[1].stop
            )
            (record,) = host.score([final])
            trace = asyncio.run(reference(task, script, answers))
            assert record.error is None
            assert record.rewards == {k: r.value for k, r in trace.rewards.items()}
            assert record.reward == pytest.approx(trace.reward, abs=1e-12)
            assert record.metrics == trace.metrics
            compared += record.reward > 0
    assert compared > 10


def test_rollouts_of_one_row_do_not_share_state(load, host_of):
    host = host_of(load())
    first, second = host.reset([0, 0])
    arguments = {"account": "new", "amount": 3}
    assert host.step([call(first.rollout_id, "deposit", arguments)]) == ["3"]
    assert host.step([call(second.rollout_id, "deposit", arguments)]) == ["3"]


def test_schemas_and_prompts_are_those_of_the_job(load, host_of):
    host = host_of(load(num_tasks=3))
    schemas = host.tool_schemas()
    assert [schema["function"]["name"] for schema in schemas] == ["balance", "deposit"]
    assert schemas[1]["function"]["parameters"]["required"] == ["account", "amount"]
    rows = host.rows(10)
    assert len(rows) == 3
    assert rows[0].system_prompt == "Use deposit and balance."
    with pytest.raises(JailError, match=r"env\.no_such_row"):
        host.reset([3])


def test_bad_calls_are_answered_with_what_was_wrong(load, host_of):
    host = host_of(load())
    (start,) = host.reset([0])
    rid = start.rollout_id
    wrong = [
        call(rid, "fly", {}),
        call(rid, "deposit", {"account": "ann"}),
        call(rid, "deposit", {"account": "ann", "amount": "much"}),
        call(rid, "deposit", {"account": "ann", "amount": 0}),
        CallRequest(
            rollout_id=rid, text="<tool_call>{", name="", arguments={}, malformed="no JSON"
        ),
    ]
    answers = host.step(wrong)
    assert answers[0] == "error: no tool named fly; tools: balance, deposit"
    assert answers[1] == "error: bad arguments for deposit: amount: Field required"
    assert "amount: Input should be a valid integer" in answers[2]
    assert answers[3] == "error: ValueError: amount must be positive"
    assert answers[4] == "error: no JSON"
    (record,) = host.score([answer(rid, "x")])
    assert record.metrics["turns"] == 6


STOP = """
    @vf.stop
    async def two_calls(self, trace: vf.Trace) -> bool:
        return trace.state.calls >= 2 and trace.num_turns >= 2

    @vf.reward(weight=0.8)"""


def test_a_stop_condition_ends_the_rollout(load_source):
    host = load_source(("\n    @vf.reward(weight=0.8)", STOP))
    (start,) = host.reset([0])
    balance = call(start.rollout_id, "balance", {"account": "ann"})
    assert host.step([balance])[0] is not None
    assert host.step([balance]) == [None]
    (record,) = host.score([answer(start.rollout_id, "")])
    assert record.error is None
    assert record.metrics["assistant"] == 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("return float(trace.last", "return float('nan') or float(trace.last", "finite"),
        ("return float(trace.last", "return 1e400 or float(trace.last", "finite"),
        ("return float(trace.last_reply ==", "return bool(trace.last_reply !=", "bool"),
        ("return float(trace.last", "return 'much' or float(trace.last", "str"),
        ("return float(trace.last", "return None and float(trace.last", "NoneType"),
        ("return float(trace.last", "return 10**400 or float(trace.last", "OverflowError"),
        ("async def correct(self, trace)", "def correct(self, trace)", "TypeError"),
        ("async def correct(self, trace)", "async def correct(self, trace, runtime)", "runtime"),
        pytest.param(
            "async def correct(self, trace)",
            "async def correct(self, trace, key)",
            "key",
            marks=pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
        ),
        ("return float(trace.state.calls)", "return float('inf')", "finite"),
        ("trace.state.calls)", "setattr(trace.state, 'calls', object()) or 1)", "serialize"),
    ],
)
def test_a_dishonest_or_broken_reward_is_an_error_of_the_record(load_source, old, new, said):
    host = load_source((old, new))
    (start,) = host.reset([0])
    (record,) = host.score([answer(start.rollout_id, "ANSWER: 1")])
    assert record.reward == 0.0
    assert said in str(record.error)


def use(make: Any) -> None:
    host = make()
    host.rows(2)
    host.tool_schemas()


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("from tools import State, Tools, VALUE", "from tools import Missing", "env.import"),
        ("vf.Task[Data, State, Config]", "vf.Task[Data, vf.State, Config]", "env.state"),
        ("            yield Task(", "            yield 3\n            yield Task(", "env.rows"),
        ("            yield Task(", "            return\n            yield Task(", "env.no_rows"),
        ("prompt=f", "prompt=3, name=f", "env.rows"),
        ("start, more =", "start, more, most =", "env.rows"),
        ("num_tasks: int = 40", "num_tasks: int", "env.config"),
    ],
)
def test_an_unusable_job_has_a_reason_code(load_source, old, new, code):
    with pytest.raises(JailError) as caught:
        use(lambda: load_source((old, new)))
    assert caught.value.reason == code


def test_exactly_one_taskset_must_be_exported(load, make_job):
    job = make_job()
    job["environment/__init__.py"] = b"__all__ = []\n"
    with pytest.raises(JailError, match="names 0 Taskset classes"):
        load(job)
