"""Tools answer every call with short text and count attempts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.agent.job_runner import JobRunner
from nestling.agent.paper_probe import PaperRunner
from nestling.agent.prompt import PromptRules
from nestling.agent.stage import StageFailedError
from nestling.agent.starting_files import TASKSET_PATH, episode_examples, workspace_files
from nestling.agent.tool_schemas import TOOL_NAMES, TOOL_SCHEMAS, argument_problem
from nestling.agent.tools import AgentTools, ToolLimits, capped
from nestling.agent.workspace import Workspace
from nestling.families.registry import get
from nestling.jobs.template import RANGE_GAP, REWARDS_GAP

REWARD = (
    "    @vf.reward(weight=1.0)\n    async def correct(self, trace):\n"
    "        return float(parse_answer(trace.last_reply) == self.data.answer)\n"
)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    family = get("ledger")
    files = workspace_files(family, episode_examples(family, 1, 2), PromptRules())
    return Workspace.create(tmp_path / "w", files)


@pytest.fixture
def tools(workspace: Workspace, runner: JobRunner) -> AgentTools:
    return AgentTools(workspace, "ledger", runner)


async def fill(tools: AgentTools) -> None:
    for old, new in ((RANGE_GAP, "1, 5"), (REWARDS_GAP, REWARD)):
        assert await tools.call("edit_file", {"path": TASKSET_PATH, "old": old, "new": new}) == "ok"


async def write_manifest(tools: AgentTools, text: str = 'base_model = "micro"\n') -> None:
    assert await tools.call("write_file", {"path": "job.toml", "content": text}) == "ok"


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("run_shell", {}, "no tool 'run_shell'"),
        ("", {}, "no tool ''"),
        ("read_file", {}, "lacks path"),
        ("write_file", {"path": "job.toml"}, "lacks content"),
        ("edit_file", {"path": "job.toml"}, "lacks old, new"),
        ("read_file", {"path": 3}, "needs text for path"),
        ("read_file", {"path": "TASK.md", "mode": "w"}, "no argument mode"),
        ("submit_job", {"force": True}, "no argument force"),
        ("read_file", {"path": "../secret"}, "leaves the workspace"),
        ("read_file", {"path": "none.py"}, "no such file"),
        ("write_file", {"path": "TASK.md", "content": ""}, "read-only"),
        ("write_file", {"path": "job.toml", "content": "\ud800"}, "surrogate"),
    ],
)
async def test_bad_call_is_answered_with_how_to_do_it(
    tools: AgentTools, name: str, arguments: dict[str, Any], says: str
) -> None:
    answer = await tools.call(name, arguments)
    assert answer.startswith("error: ")
    assert says in answer
    assert tools.attempts == []


def test_schemas_have_the_openai_form() -> None:
    assert [schema["function"]["name"] for schema in TOOL_SCHEMAS] == list(TOOL_NAMES)
    for schema in TOOL_SCHEMAS:
        assert schema["type"] == "function"
        parameters = schema["function"]["parameters"]
        assert parameters["required"] == list(parameters["properties"])
        arguments = dict.fromkeys(parameters["required"], "x")
        assert argument_problem(schema["function"]["name"], arguments) is None


async def test_baselines_are_rounded_lines_after_the_best_base(
    tools: AgentTools, workspace: Workspace
) -> None:
    assert await tools.call("get_baseline_scores", {}) == "best: micro\nmicro 0.26\nnano 0.17"
    others = AgentTools(workspace, "ledger", PaperRunner({"micro": 0.014, "nano": 0.6, "b": 0.6}))
    assert await others.call("get_baseline_scores", {}) == "best: b\nb 0.60\nmicro 0.01\nnano 0.60"


async def test_files_are_listed_one_a_line(tools: AgentTools) -> None:
    names = (await tools.call("list_files", {})).splitlines()
    assert {"INSTRUCTIONS.md", "TASK.md", "tools/__init__.py", TASKSET_PATH} <= set(names)


async def test_valid_job_is_accepted_at_once(tools: AgentTools, runner: JobRunner) -> None:
    await fill(tools)
    await write_manifest(tools, 'base_model = "micro"\n[prime_rl]\nlr = 1e-3\n')
    assert await tools.call("submit_job", {}) == "accepted"
    assert tools.accepted is not None
    assert tools.accepted.attempt.number == 1
    manifest = tools.accepted.attempt.manifest
    assert manifest is not None
    assert (manifest.base_model, manifest.prime_rl) == ("micro", {"lr": 1e-3})
    assert set(tools.accepted.bundle.files) >= {"job.toml", TASKSET_PATH}
    assert not any(name.startswith("tools/") for name in tools.accepted.bundle.files)
    assert (await tools.call("submit_job", {})).startswith("error: a job was already accepted")


async def test_problems_come_back_with_attempts_left_until_they_are_used_up(
    tools: AgentTools,
) -> None:
    answers = [await tools.call("submit_job", {})]
    await write_manifest(tools, 'base_model = "gpt-9"\n')
    answers.append(await tools.call("submit_job", {}))
    await write_manifest(tools, "[[[")
    answers.append(await tools.call("submit_job", {}))
    assert [answer.splitlines()[0] for answer in answers] == [
        f"rejected; submissions left: {left}" for left in (2, 1, 0)
    ]
    assert "job.toml is missing" in answers[0]
    assert "gpt-9" in answers[1]
    assert all("error [" in answer for answer in answers)
    assert [attempt.readable for attempt in tools.attempts] == [False, True, False]
    assert [attempt.number for attempt in tools.attempts] == [1, 2, 3]
    assert all(attempt.problems for attempt in tools.attempts)
    await fill(tools)
    await write_manifest(tools)
    assert (await tools.call("submit_job", {})).startswith("error: no submissions left")
    assert tools.accepted is None


async def test_hostile_manifest_is_a_rejection(tools: AgentTools) -> None:
    await fill(tools)
    await write_manifest(tools, "a = " + "[" * 4_000)
    assert (await tools.call("submit_job", {})).startswith("rejected")
    await write_manifest(tools, "a = " + "9" * 4_090)
    assert (await tools.call("submit_job", {})).startswith("rejected")


async def test_results_are_capped(workspace: Workspace, runner: JobRunner) -> None:
    tools = AgentTools(workspace, "ledger", runner, limits=ToolLimits(max_result_chars=300))
    await tools.call("write_file", {"path": "data/long.txt", "content": "x" * 5000})
    answer = await tools.call("read_file", {"path": "data/long.txt"})
    assert len(answer) == 300
    assert answer.endswith("... (5000 characters, the rest is left out)")
    assert capped("short", 300) == "short"


@pytest.mark.parametrize(
    ("stage_name", "tool"), [("check", "submit_job"), ("baselines", "get_baseline_scores")]
)
async def test_dead_machine_room_is_not_the_agents_error(
    workspace: Workspace, make_runner: Any, stage_name: str, tool: str
) -> None:
    tools = AgentTools(workspace, "ledger", make_runner(die_in=stage_name))
    await fill(tools)
    await write_manifest(tools)
    with pytest.raises(StageFailedError, match="the worker is gone"):
        await tools.call(tool, {})
    assert tools.attempts == []  # an attempt the machine lost is not the agent's


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(
    st.one_of(st.sampled_from(["path", "content", "old", "new"]), st.text(max_size=5)),
    st.one_of(JSON, st.sampled_from([TASKSET_PATH, "job.toml", "data/x", "../x", RANGE_GAP])),
    max_size=4,
)
CALLS = st.lists(
    st.tuples(st.one_of(st.sampled_from(TOOL_NAMES), st.text(max_size=10)), ARGUMENTS), max_size=8
)


@pytest.mark.long
@given(calls=CALLS)
@settings(max_examples=60, deadline=None)
def test_no_call_raises(
    tmp_path_factory: pytest.TempPathFactory, make_runner: Any, calls: list[tuple[str, dict]]
) -> None:
    workspace = Workspace.create(
        tmp_path_factory.mktemp("law") / "w", {"environment/taskset.py": "RANGE"}
    )
    tools = AgentTools(workspace, "ledger", make_runner())
    for name, arguments in calls:
        answer = asyncio.run(tools.call(name, arguments))
        assert isinstance(answer, str)
        assert len(answer) <= 1200
    assert len(tools.attempts) <= 3
