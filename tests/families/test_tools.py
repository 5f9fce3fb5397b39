import asyncio
import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from verifiers.v1.mcp.server import _call_state
from verifiers.v1.state import state_cls

from nestling.families import public_files
from nestling.families.family import Family
from nestling.families.hidden_taskset import hidden_taskset
from nestling.families.registry import ALL, get

FAMILIES = [get(name) for name in ALL]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=ALL)


def module(family: Family) -> Any:
    return importlib.import_module(f"nestling.families.public.{family.name}_tools")


async def tools_of(family: Family, data: Any) -> Any:
    tools = module(family).Tools(vf.ToolsetConfig())
    await tools.setup()
    await tools.setup_task(data)
    return tools


@every_family
async def test_the_toolset_answers_as_the_pure_functions(family: Family) -> None:
    rng = random.Random(0)
    for _ in range(20):
        item = family.sample(rng, *family.eval_range)
        tools = await tools_of(family, module(family).Data(**item.to_dict()))
        state, pure = module(family).State(), family.start(item)
        token = _call_state.set(state)
        try:
            solution = family.solve(item)
            step = next(solution)
            num_calls = 0
            while True:
                name, arguments = step[1:]
                if rng.random() < 0.3:
                    name, arguments = family.corrupt(item, rng, name, arguments)
                expected = family.call(item, pure, name, dict(arguments))
                assert getattr(tools, name)(**arguments) == expected
                num_calls += 1
                assert state.calls == num_calls
                document = json.loads(state.model_dump_json())
                assert {key: document[key] for key in pure} == json.loads(json.dumps(pure))
                state = module(family).State.model_validate(document)
                _call_state.set(state)
                step = solution.send(expected)
        except StopIteration:
            pass
        finally:
            _call_state.reset(token)


@every_family
async def test_schemas_say_what_the_signatures_say(family: Family) -> None:
    server = MCPServer("tools")
    module(family).Tools(vf.ToolsetConfig()).register(server)
    listed = {tool.name: tool for tool in await server.list_tools()}
    assert set(listed) == set(family.rules.SIGNATURES)
    for name, arguments in family.rules.SIGNATURES.items():
        properties = listed[name].input_schema["properties"]
        kinds = {"string": str, "integer": int}
        assert {key: kinds[value["type"]] for key, value in properties.items()} == arguments
        assert listed[name].description


@every_family
async def test_two_rollouts_of_one_row_do_not_share_state(family: Family) -> None:
    data = module(family).sample(random.Random(0), *family.eval_range)
    before = data.model_dump_json()
    item = family.sample(random.Random(0), *family.eval_range)
    answers = []
    for _ in range(2):
        tools = await tools_of(family, data)
        token = _call_state.set(module(family).State())
        try:
            solution = family.solve(item)
            step = next(solution)
            while True:
                step = solution.send(getattr(tools, step[1])(**step[2]))
        except StopIteration as end:
            answers.append(end.value)
        finally:
            _call_state.reset(token)
    assert answers == [data.answer, data.answer]
    assert data.model_dump_json() == before


@every_family
def test_the_workspace_package_imports_alone(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = public_files(family.name)
    package = tmp_path / "tools"
    package.mkdir()
    for name, content in files.items():
        assert b"nestling" not in content
        (package / name).write_bytes(content)
    assert files.keys() == {
        "__init__.py", "answer.py", "item.py", "rollout.py", "steps.py",
        f"{family.name}.py", f"{family.name}_tools.py",
    }  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    try:
        tools = importlib.import_module("tools")
        row = tools.sample(random.Random(0), *family.eval_range)
        assert isinstance(row, tools.Data)
        assert tools.parse_answer(f"ANSWER: {row.answer}") == row.answer
        assert tools.Data.model_validate_json(row.model_dump_json()) == row
        assert state_cls(tools.Tools) is tools.State
        assert row.prompt == family.sample(random.Random(0), *family.eval_range).prompt
        for phrase in (family.name, "Tools", family.tool_signatures):
            assert phrase in (tools.__doc__ or "")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "tools"]:
            del sys.modules[name]


@every_family
def test_the_hidden_taskset_pays_exactly_what_the_family_grades(family: Family) -> None:
    rng = random.Random(5)
    items = [family.sample(rng, *family.eval_range) for _ in range(3)]
    taskset = hidden_taskset(family.name, items)
    tasks = list(taskset)
    assert [(t.data.prompt, t.data.system_prompt, t.data.answer) for t in tasks] == [
        (i.prompt, i.system_prompt, i.answer) for i in items
    ]
    for task, item in zip(tasks, items, strict=True):
        assert state_cls(type(task)) is module(family).State
        assert [type(toolset) for toolset in type(task).toolsets(task.config)] == [
            module(family).Tools
        ]
        for text in (f"ANSWER: {item.answer}", f"so {item.answer}", "ANSWER: no"):
            assert asyncio.run(_reward(task, text)) == family.grade(item, text)


async def _reward(task: Any, text: str) -> float:
    from verifiers.v1 import graph
    from verifiers.v1.trace import AgentInfo, TraceTask
    from verifiers.v1.types import AssistantMessage, Response, UserMessage

    trace = vf.Trace(
        task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=AgentInfo(config=vf.AgentConfig()),
    )
    turn = graph.prepare_turn(trace, [UserMessage(content=task.data.prompt)], [])
    message = AssistantMessage(content=text)
    turn.commit(
        Response(id="", created=0, model="local", message=message, finish_reason="stop", usage=None)
    )
    trace.stop("agent_completed")
    await task.score(trace)
    return float(trace.reward)
