"""Damaged input by the ten thousand: every trusted reader answers or refuses, and stays small.

A few hundred inputs a target in the fast suite; with `-m slow` more than a hundred thousand in all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nestling.agent.paper_probe import PaperRunner
from nestling.agent.tools import AgentTools
from nestling.agent.workspace import Workspace, WorkspaceError
from nestling.core.errors import JobFailedError, JobRejectedError, ModelError
from nestling.core.rundir import ArtifactStore
from nestling.engine.chat import FinalAnswer, MalformedCall, ToolCall, parse_turn, render_call
from nestling.engine.checkpoint import Model, load_weights, save_model, save_weights
from nestling.engine.config import ModelConfig
from nestling.engine.weights import Weights
from nestling.families.registry import ALL, get
from nestling.families.vocabulary import tokenizer
from nestling.fleet.handlers import pack_bundle, unpack_bundle
from nestling.inner.lineage import check_weights, tensor_specs
from nestling.inner.pinned_base import PinnedBase
from nestling.jobs import env_protocol as wire
from nestling.jobs.bundle import Bundle
from nestling.jobs.leaks import LeakIndex, leak_problems
from nestling.jobs.manifest import JobManifest, parse_manifest
from nestling.jobs.probe_policies import lesson_of
from nestling.jobs.probe_static import static_problems
from nestling.jobs.rollout_env import Row
from nestling.jobs.template import template_files, template_job

pytestmark = pytest.mark.long

FAST, SLOW = 250, 12_000
SLOW_COUNTS = {"configs": 1_000, "checkpoints": 6_000, "bundles": 6_000, "worlds": 6_000}
"""Targets that take milliseconds an input."""
CONFIG = ModelConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4
)  # fmt: skip


@dataclass
class Target:
    """One reader: honest inputs, and how it is fed. `feed` fails on anything but a refusal."""

    seeds: list[bytes]
    feed: Callable[[bytes], None]
    close: Callable[[], None] = lambda: None


def text_of(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def manifest(_: Path) -> Target:
    seeds = [template_files(name)["job.toml"].encode() for name in ALL]
    seeds.append(b'base_model = "nano"\n[prime_rl]\nlr=1e-3\n[env]\na = 1\nb = "x"\nc = true\n')

    def feed(data: bytes) -> None:
        with contextlib.suppress(JobRejectedError):
            assert isinstance(parse_manifest(data), JobManifest)

    return Target(seeds, feed)


def chat_turns(_: Path) -> Target:
    seeds = [
        render_call("submit_job", {}).encode(),
        b"thinking\n" + render_call("write_file", {"path": "a", "content": "x\ny"}).encode(),
        b"ANSWER: 12",
        render_call("deposit", {"account": "ann", "amount": 5, "more": [1, {"a": None}]}).encode(),
    ]

    def feed(data: bytes) -> None:
        turn = parse_turn(text_of(data))
        assert isinstance(turn, FinalAnswer | MalformedCall | ToolCall)
        if isinstance(turn, ToolCall):
            json.dumps([turn.name, turn.arguments], ensure_ascii=False, allow_nan=False).encode()
            assert text_of(data).count("<tool_call>") >= 1

    return Target(seeds, feed)


def replies(_: Path) -> Target:
    schema = {"function": {"name": "calc", "parameters": {"properties": {"a": {"type": "string"}}}}}
    frames: list[wire.Reply] = [
        wire.RowsReply(
            rows=[wire.RowFrame(index=0, system_prompt="s", prompt="p", data_json="{}")], more=True
        ),
        wire.ToolsReply(schemas=[schema]),
        wire.Started(starts=[wire.StartFrame(rollout_id=1, system_prompt="", prompt="p")]),
        wire.StepReply(answers=["1", None]),
        wire.ScoreReply(
            records=[wire.ScoreFrame(reward=1.0, rewards={"r": 1.0}, metrics={}, error=None)]
        ),
        wire.Fault(code="env.crashed", detail="x"),
        wire.Loaded(),
    ]

    def feed(data: bytes) -> None:
        with contextlib.suppress(wire.ProtocolError):
            reply = wire.decode_reply(data)
            if isinstance(reply, wire.ScoreReply):
                assert all(abs(record.reward) <= 1e9 for record in reply.records)
            if isinstance(reply, wire.ToolsReply):
                assert all(isinstance(s["function"]["name"], str) for s in reply.schemas)

    return Target([wire.encode(frame)[4:] for frame in frames], feed)


def requests(_: Path) -> Target:
    call = wire.CallFrame(
        rollout_id=1, text="t", name="calc", arguments={"a": [1]}, malformed=None,
        prompt_tokens=1, completion_tokens=1,
    )  # fmt: skip
    final = wire.FinalFrame(
        rollout_id=1, text="x", stop="done", prompt_tokens=0, completion_tokens=0
    )
    frames: list[wire.Request] = [
        wire.Load(env_args={"a": 1}), wire.Rows(start=0, limit=5), wire.Tools(),
        wire.Reset(rows=[1, 2]), wire.Step(calls=[call]), wire.Score(finals=[final]),
    ]  # fmt: skip

    def feed(data: bytes) -> None:
        with contextlib.suppress(wire.ProtocolError):
            wire.decode_request(data)
        with contextlib.suppress(wire.ProtocolError):
            assert 0 < wire.frame_length(data[:4]) <= wire.MAX_FRAME_BYTES

    return Target([wire.encode(frame)[4:] for frame in frames], feed)


def outside(root: Path) -> list[str]:
    return sorted(path.name for path in root.parent.iterdir())


def paths(folder: Path) -> Target:
    root = folder / "workspace"
    workspace = Workspace.create(root, {"TASK.md": "task", "data/a.txt": "old text"})
    before = outside(root)
    seeds = [b"data/a.txt", b"environment/taskset.py", b"job.toml", b"../x", b"/etc/passwd",
             b"data/../../outside", b"TASK.md", b"data/sub/b.json"]  # fmt: skip

    def feed(data: bytes) -> None:
        path = text_of(data)
        for act in (
            lambda: workspace.read(path),
            lambda: workspace.write(path, "x"),
            lambda: workspace.edit(path, "x", "y"),
        ):
            with contextlib.suppress(WorkspaceError):
                act()
        assert outside(root) == before
        assert (root / "TASK.md").read_text() == "task"
        assert len(workspace.paths()) <= workspace.limits.max_files

    return Target(seeds, feed)


def tool_calls(folder: Path) -> Target:
    """Raw model text, through the parser, to the tools."""
    root = folder / "workspace"
    files = {"TASK.md": "task", **{k: v for k, v in template_files("ledger").items() if "/" in k}}
    tools = AgentTools(Workspace.create(root, files), "ledger", PaperRunner(), max_attempts=10**6)
    before = outside(root)
    seeds = [
        render_call(name, arguments).encode()
        for name, arguments in (
            ("get_baseline_scores", {}), ("list_files", {}), ("read_file", {"path": "TASK.md"}),
            ("write_file", {"path": "data/x.txt", "content": "x"}), ("submit_job", {}),
            ("edit_file", {"path": "environment/taskset.py", "old": "random", "new": "x"}),
            ("write_file", {"path": "job.toml", "content": 'base_model = "nano"\n'}),
        )
    ]  # fmt: skip
    loop = asyncio.new_event_loop()

    def feed(data: bytes) -> None:
        turn = parse_turn(text_of(data))
        if isinstance(turn, ToolCall):
            answer = loop.run_until_complete(tools.call(turn.name, turn.arguments))
            assert isinstance(answer, str)
            assert len(answer) <= 1200
            tools.accepted = None
            assert outside(root) == before

    return Target(seeds, feed, loop.close)


def tensors(folder: Path) -> Target:
    save_weights(folder, Weights.init(CONFIG, 1, torch.Generator().manual_seed(0)))
    honest = (folder / "model.safetensors").read_bytes()
    pinned = tensor_specs(honest)

    def feed(data: bytes) -> None:
        with contextlib.suppress(ModelError):
            check_weights(data, pinned)

    return Target([honest], feed)


def checkpoints(folder: Path) -> Target:
    save_weights(folder, Weights.init(CONFIG, 1, torch.Generator().manual_seed(0)))
    file = folder / "model.safetensors"

    def feed(data: bytes) -> None:
        file.write_bytes(data)
        with contextlib.suppress(ModelError):
            assert bool(torch.isfinite(load_weights(folder).flat).all())

    return Target([file.read_bytes()], feed)


def configs(folder: Path) -> Target:
    """A trained folder's config, tokenizer and strange files: the scorer looks at none of them."""
    words = tokenizer()
    config = CONFIG.model_copy(update={"vocab_size": words.vocab_size})
    weights = Weights.init(config, 1, torch.Generator().manual_seed(0))
    for name in ("base", "trained"):
        save_model(folder / name, Model(config=config, weights=weights, tokenizer=words))
    pinned = PinnedBase(folder / "base")
    trained = folder / "trained"
    honest = (trained / "config.json").read_bytes()

    def feed(data: bytes) -> None:
        (trained / "config.json").write_bytes(data)
        (trained / "tokenizer.json").write_bytes(data)
        (trained / "model.safetensors.index.json").write_bytes(data)
        assert pinned.delta_norm(pinned.load_trained(trained)) == 0.0

    return Target([honest, b'{"weight_map": {"model.norm.weight": "../x.safetensors"}}'], feed)


def sources(_: Path) -> Target:
    seeds = [template_files(name)["environment/taskset.py"].encode() for name in ALL]

    def feed(data: bytes) -> None:
        try:
            data.decode()
        except UnicodeDecodeError:
            return  # the bundle refuses it before
        for problem in static_problems({"environment/taskset.py": data}):
            assert problem.line()

    return Target(seeds, feed)


def bundles(folder: Path) -> Target:
    store = ArtifactStore(folder)
    seeds = [store.get(pack_bundle(store, template_job(name))) for name in ("ledger", "triage")]

    def feed(data: bytes) -> None:
        with contextlib.suppress(JobRejectedError):
            Bundle.from_files(
                {"job.toml": b"", "environment/__init__.py": b"", text_of(data[:99]): data}
            )
        name = store.put(data)
        with contextlib.suppress(JobFailedError, JobRejectedError):
            assert unpack_bundle(store, name).job_hash
        store.path(name).unlink()

    return Target(seeds, feed)


def worlds(_: Path) -> Target:
    """Rows of a hostile job, solved by our own solvers and scanned for leaks."""
    rng = random.Random(0)
    families = [get(name) for name in ALL]
    seeds = [
        json.dumps(family.sample(rng, 1, 3).to_dict()).encode()
        for family in families
        for _ in "abc"
    ]
    indexes = {
        f.name: LeakIndex.build(f, {"b": [f.sample(rng, 1, 2)]}, honest_rows=20) for f in families
    }

    def feed(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return  # the probe refuses it before
        row = Row(index=0, system_prompt="", prompt=text[:500] or "x", data_json=text[:32_000])
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(row.data_json)
            family = families[len(data) % len(families)]
            lesson = lesson_of(row, family, (), "0", 1)
            assert isinstance(lesson.wrong, str)
            leak_problems(indexes[family.name], [row], {"data/x.txt": data})

    return Target(seeds, feed)


TARGETS = [manifest, chat_turns, replies, requests, paths, tool_calls, tensors, checkpoints, configs,
           sources, bundles, worlds]  # fmt: skip


def slow_count(make: Callable[[Path], Target]) -> int:
    return SLOW_COUNTS.get(make.__name__, SLOW)


@pytest.mark.parametrize("make", TARGETS, ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "size", ["few", pytest.param("many", marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_damaged_input_is_read_or_refused(request, make, size, tmp_path, mutated, resident_mib):
    count = FAST if size == "few" else slow_count(make)
    target = make(tmp_path)
    request.addfinalizer(target.close)
    for seed in target.seeds:
        target.feed(seed)
    before = resident_mib()
    for number, data in enumerate(mutated(target.seeds, count, count)):
        try:
            target.feed(data)
        except Exception as error:
            raise AssertionError(f"input {number}: {data[:300]!r}: {error!r}") from error
    assert resident_mib() - before < 300


def test_the_slow_suite_feeds_more_than_a_hundred_thousand_inputs():
    assert sum(slow_count(make) for make in TARGETS) > 100_000
