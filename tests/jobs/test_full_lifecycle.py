"""The env worker's host beside verifiers' own full lifecycle: same rewards, same traces."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from nestling.bench.lifecycle import ScriptedTurns, play_lifecycle
from nestling.families.hidden_taskset import hidden_taskset
from nestling.families.registry import ALL, get
from nestling.jobs.probe_policies import lesson_of
from nestling.jobs.rollout_env import CallRequest, FinalRequest
from nestling.jobs.verifiers_host import VerifiersHost

MAX_TURNS = 6


def played(host: VerifiersHost, scripts: list[ScriptedTurns]) -> list[tuple[Any, Any]]:
    """Record and trace of each row under its script, turn by turn over all rows at once."""
    starts = host.reset(range(len(scripts)))
    traces = [host._live[start.rollout_id].trace for start in starts]
    stopped: set[int] = set()
    for turn in range(MAX_TURNS):
        calling = [
            row for row, s in enumerate(scripts) if turn < len(s.calls) and row not in stopped
        ]
        answers = host.step([call_of(scripts[r], turn, starts[r].rollout_id) for r in calling])
        stopped |= {row for row, text in zip(calling, answers, strict=True) if text is None}
    finals = [
        FinalRequest(
            rollout_id=start.rollout_id,
            text="" if row in stopped else script.final or "",
            stop="done" if script.final is not None else "max_turns",
            prompt_tokens=script.prompt_tokens,
            completion_tokens=script.completion_tokens,
        )
        for row, (start, script) in enumerate(zip(starts, scripts, strict=True))
    ]
    return list(zip(host.score(finals), traces, strict=True))


def call_of(script: ScriptedTurns, turn: int, rollout_id: int) -> CallRequest:
    name, arguments = script.calls[turn]
    return CallRequest(
        rollout_id=rollout_id,
        text="<tool_call>",
        name=name,
        arguments=arguments,
        prompt_tokens=script.prompt_tokens,
        completion_tokens=script.completion_tokens,
    )


def what_matters(trace: Any) -> dict[str, Any]:
    """Of a trace: everything but ids, clocks and where it ran."""
    return {
        "task": (trace.task.type, trace.task.key, trace.task.hash, trace.task.data.model_dump()),
        "messages": [
            node.message.model_dump(exclude={"id"}, exclude_none=True) for node in trace.nodes
        ],
        "parents": [node.parent for node in trace.nodes],
        "sampled": [node.sampled for node in trace.nodes],
        "calls": [(call.node, call.finish_reason, call.usage) for call in trace.calls],
        "state": trace.state.model_dump(),
        "rewards": trace.rewards,
        "metrics": trace.metrics,
        "reward": trace.reward,
        "stop": trace.stop_condition,
        "turns": (trace.num_turns, trace.num_branches, trace.is_truncated),
        "tokens": (trace.num_input_tokens, trace.num_output_tokens, trace.num_total_tokens),
        "transcript": trace.transcript,
    }


def same(taskset: Any, scripts: list[ScriptedTurns]) -> list[float]:
    """Play both ways and compare; the rewards."""
    tasks = list(taskset)
    host = VerifiersHost(taskset)
    try:
        ours = played(host, scripts)
    finally:
        host.close()
    theirs = asyncio.run(play_lifecycle(tasks, scripts, max_turns=MAX_TURNS))
    for (record, trace), other in zip(ours, theirs, strict=True):
        assert other.ok, other.errors
        assert record.error is None
        assert record.rewards == {name: one.value for name, one in other.rewards.items()}
        assert record.reward == pytest.approx(other.reward, abs=1e-12)
        assert record.metrics == other.metrics
        assert what_matters(trace) == what_matters(other)
    return [record.reward for record, _ in ours]


def script_of(host_row: Any, family: str, rng: random.Random) -> ScriptedTurns:
    lesson = lesson_of(host_row, get(family), (), "0", 0)
    calls = [(name, arguments) for _, name, arguments in lesson.solution][:MAX_TURNS]
    fits = len(calls) < MAX_TURNS
    answer = lesson.answer if rng.random() < 0.6 else lesson.wrong
    return ScriptedTurns(
        calls=calls,
        final=f"ANSWER: {answer}" if fits else None,
        prompt_tokens=rng.randint(20, 60),
        completion_tokens=rng.randint(1, 9),
    )


@pytest.mark.long
@pytest.mark.parametrize("family", ALL)
def test_every_familys_rollouts_are_those_of_the_full_lifecycle(family: str) -> None:
    rng = random.Random(11)
    chosen = get(family)
    items = [chosen.sample(rng, *chosen.eval_range) for _ in range(12)]
    taskset = hidden_taskset(family, items)
    host = VerifiersHost(taskset)
    scripts = [script_of(row, family, rng) for row in host.rows(12)]
    host.close()
    rewards = same(taskset, scripts)
    assert {0.0, 1.0} <= set(rewards)


HOOKS = """
    async def setup(self, trace, runtime) -> None:
        self.bonus = 3

    async def finalize(self, trace, runtime) -> None:
        trace.state.calls += self.bonus

    @vf.stop
    async def rich(self, trace: vf.Trace) -> bool:
        return trace.state.accounts.get("ann", 0) > 100

    @vf.reward(weight=0.8)"""


@pytest.mark.long
def test_hooks_stops_metrics_and_cut_rollouts_are_those_of_the_full_lifecycle(
    tmp_path, monkeypatch, ledger_tools, make_job, ledger_taskset_source
) -> None:
    import sys

    from nestling.jobs.verifiers_host import load_taskset_from

    source = ledger_taskset_source.replace("\n    @vf.reward(weight=0.8)", HOOKS)
    files = make_job(source) | {f"tools/{name}": data for name, data in ledger_tools.items()}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    taskset = load_taskset_from(tmp_path)
    try:
        rng = random.Random(4)
        scripts = []
        for task in taskset:
            amounts = [rng.randint(1, 60) for _ in range(rng.randint(1, 4))]
            calls = [("deposit", {"account": "ann", "amount": amount}) for amount in amounts]
            answer = json.loads(task.data.model_dump_json())["answer"]
            final = rng.choice([f"ANSWER: {answer}", "ANSWER: 0", None])
            if final is None:
                calls += [("balance", {"account": "ann"})] * (MAX_TURNS - len(calls))
            scripts.append(ScriptedTurns(calls=calls, final=final, prompt_tokens=7))
        rewards = same(taskset, scripts)
        assert len(set(rewards)) > 1
    finally:
        for name in set(sys.modules) - known:
            if name.partition(".")[0] in ("environment", "tools"):
                del sys.modules[name]
