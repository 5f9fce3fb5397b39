"""A server that samples: the same play as in this process, and servers that die."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError, JobFailedError
from nestling.core.seeds import derive_seed
from nestling.engine.checkpoint import load_model, save_model
from nestling.engine.lora import LoraConfig, LoraWeights, save_adapter
from nestling.engine.serve import ChatServer, ServeConfig
from nestling.families import bases
from nestling.families.hidden_taskset import hidden_taskset
from nestling.families.item_play import EVAL_SAMPLING
from nestling.families.splits import dev_items
from nestling.inner.openai_client import ask_all
from nestling.inner.openai_config import OpenAiConfig
from nestling.inner.openai_play import play_served
from nestling.inner.openai_request import AskedTurn, SampledTurn, read_turn, turn_body
from nestling.inner.openai_serving import Serving
from nestling.inner.pinned_base import PinnedBase
from nestling.jobs.rollout_env import CallRequest, FinalRequest, RolloutStart, ScoreRecord
from nestling.jobs.rollouts import play_env
from nestling.jobs.verifiers_host import VerifiersHost

pytestmark = pytest.mark.long

N = 8


@contextmanager
def nano_served() -> Iterator[str]:
    """The shipped model behind our own server, on a thread with a loop of its own."""
    ready, loop, done = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    told: list[str] = []

    async def serve() -> None:
        model = load_model(bases.get("nano").folder)
        config = ServeConfig(name="nano", port=0, num_slots=N, max_len=600, shows_tools=False)
        server = ChatServer(model, config, SystemClock())
        try:
            async with server.listening() as url:
                told.append(url)
                ready.set()
                await done.wait()
        finally:
            server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        yield told[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


class Heard(VerifiersHost):
    """The scorer's own environment, keeping what it was told."""

    def __init__(self, family: str) -> None:
        super().__init__(hidden_taskset(family, dev_items(family, N)))
        self.calls: dict[int, list[CallRequest]] = {}
        self.finals: list[FinalRequest] = []

    def step(self, calls: Sequence[CallRequest]) -> list[str | None]:
        for call in calls:
            self.calls.setdefault(call.rollout_id, []).append(call)
        return super().step(calls)

    def score(self, finals: Sequence[FinalRequest]) -> list[ScoreRecord]:
        self.finals += finals
        return super().score(finals)


@pytest.mark.parametrize(
    "family",
    [
        "ledger",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("calc_chain", "multi_hop", "triage")
        ),
    ],
)
def test_our_own_server_gives_the_play_of_the_embedded_scorer(family: str) -> None:
    """At temperature 0: every call, every final text, every count of tokens, every reward."""
    seeds = [derive_seed(1, index) for index in range(N)]
    config = OpenAiConfig(kind="nestling", temperature=0.0)
    params = replace(EVAL_SAMPLING, temperature=0.0)
    model = load_model(bases.get("nano").folder)
    with closing(Heard(family)) as here, closing(Heard(family)) as there, nano_served() as url:

        def ask(turns: Sequence[AskedTurn]) -> list[SampledTurn]:
            bodies = [
                turn_body(one, model="nano", temperature=0.0, extensions=True) for one in turns
            ]
            replies: list[dict[str, Any] | None] = [None] * len(bodies)
            ask_all(
                url,
                bodies,
                replies,
                config=config,
                key="",
                is_alive=lambda: True,
                rng=random.Random(0),
            )
            return [read_turn(reply) for reply in replies]

        played = play_env(model, here, range(N), seeds, params)
        served = play_served(ask, there, model.tokenizer, range(N), seeds, params)
    assert there.calls == here.calls
    assert there.finals == here.finals
    assert served == [one.score for one in played]
    assert len(here.calls) > 1
    assert len({final.text for final in here.finals}) > 1


class Bell:
    """An environment that counts: exactly one call, then the answer, is right."""

    def __init__(self) -> None:
        self.calls: dict[int, int] = {}

    def rows(self, limit: int) -> list[Any]:
        return []

    def tool_schemas(self) -> list[dict[str, Any]]:
        return [
            {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        ]

    def reset(self, rows: Sequence[int]) -> list[RolloutStart]:
        return [RolloutStart(rollout_id=row, system_prompt="", prompt=f"ann {row}") for row in rows]

    def step(self, calls: Sequence[CallRequest]) -> list[str | None]:
        for call in calls:
            self.calls[call.rollout_id] = self.calls.get(call.rollout_id, 0) + 1
        return ["7" for _ in calls]

    def score(self, finals: Sequence[FinalRequest]) -> list[ScoreRecord]:
        return [
            ScoreRecord(
                reward=float(final.text == "ANSWER: 7" and self.calls[final.rollout_id] == 1)
            )
            for final in finals
        ]

    def close(self) -> None:
        pass


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in's command; its folder is beside it."""
    program = tmp_path / "vllm"
    script = Path(__file__).with_name("standin_vllm.py")
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    program.chmod(0o700)
    monkeypatch.setenv("STANDIN_FOLDER", str(tmp_path))
    return program


def notes(vllm: Path, kind: str) -> list[Any]:
    lines = vllm.with_name("asked.jsonl").read_text().splitlines()
    return [note[kind] for note in map(json.loads, lines) if kind in note]


def trained(base: Path, folder: Path, *, adapter: bool) -> Path:
    """A copy of the base that has moved, by an adapter that lies beside it or by itself."""
    model = load_model(base)
    lora = LoraWeights.init(model.config, LoraConfig(rank=2))
    lora.flat += 0.01
    save_model(folder, replace(model, weights=lora.merged(model.weights)))
    if adapter:
        save_adapter(folder / "adapter", lora)
    return folder


def scored(serving: Serving, base: Path, folder: Path, bell: Bell) -> list[float]:
    pinned = PinnedBase(base)
    scores = serving.play(
        pinned, "tiny", folder, pinned.load_trained(folder), bell, range(N), EVAL_SAMPLING
    )
    return [score.reward for score in scores]


def test_base_and_adapter_are_served_by_one_server_under_two_names(
    vllm: Path, base: Path, tmp_path: Path
) -> None:
    serving = Serving(OpenAiConfig(program=str(vllm), keep=True))
    assert "stand-in" in serving.fingerprint()
    try:
        assert scored(serving, base, base, Bell()) == [1.0] * N
        folder = trained(base, tmp_path / "model", adapter=True)
        assert scored(serving, base, folder, Bell()) == [1.0] * N
    finally:
        serving.close()
    asked = notes(vllm, "asked")
    (adapter,) = notes(vllm, "loaded")
    assert len(notes(vllm, "started")) == 1
    assert [body["model"] for body in asked] == ["tiny"] * 2 * N + [adapter] * 2 * N
    assert adapter.startswith("trained-")
    assert notes(vllm, "unloaded") == [adapter]

    def seeds(bodies: list[Any]) -> list[Any]:
        return sorted((body["seed"], len(body["messages"])) for body in bodies)

    assert seeds(asked[: 2 * N]) == seeds(asked[2 * N :])


def test_whole_model_is_served_from_a_checked_copy(vllm: Path, base: Path, tmp_path: Path) -> None:
    serving = Serving(
        OpenAiConfig(program=str(vllm), arguments=("--gpu-memory-utilization", "0.5"))
    )
    folder = trained(base, tmp_path / "model", adapter=False)
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    assert scored(serving, base, folder, Bell()) == [1.0] * N
    (model,) = notes(vllm, "started")
    assert Path(model) not in (folder, base)
    assert not Path(model).exists()
    assert {body["model"] for body in notes(vllm, "asked")} == {"trained"}
    assert {one.pid for one in psutil.Process().children(recursive=True)} <= before


def test_adapter_of_other_weights_is_not_served(vllm: Path, base: Path, tmp_path: Path) -> None:
    folder = trained(base, tmp_path / "model", adapter=True)
    other = LoraWeights.init(load_model(base).config, LoraConfig(rank=2))
    other.flat += 0.02
    shutil.rmtree(folder / "adapter")
    save_adapter(folder / "adapter", other)
    assert scored(Serving(OpenAiConfig(program=str(vllm))), base, folder, Bell()) == [1.0] * N
    assert notes(vllm, "loaded") == []


@pytest.mark.parametrize(
    "die_at",
    [3, pytest.param(0, marks=pytest.mark.slow), pytest.param(N + 2, marks=pytest.mark.slow)],
)
def test_server_that_dies_is_started_again_and_nothing_is_played_twice(
    vllm: Path, base: Path, tmp_path: Path, die_at: int
) -> None:
    vllm.with_name("die_at").write_text(str(die_at))
    serving, bell = Serving(OpenAiConfig(program=str(vllm), parallel=4)), Bell()
    folder = trained(base, tmp_path / "model", adapter=True)
    assert scored(serving, base, folder, bell) == [1.0] * N
    assert serving.restarts == 1
    assert bell.calls == dict.fromkeys(range(N), 1)
    assert len(notes(vllm, "started")) == len(notes(vllm, "loaded")) == 2
    answered = [json.dumps(body, sort_keys=True) for body in notes(vllm, "asked")]
    # A turn that was under way when the server died may be asked for again, an answered one never is.
    assert len(set(answered)) == 2 * N
    assert len(answered) <= 2 * N + 4


def test_server_that_keeps_dying_fails_the_scoring(vllm: Path, base: Path) -> None:
    vllm.with_name("die_at").write_text("0")
    with pytest.raises(JobFailedError) as caught:
        scored(Serving(OpenAiConfig(program=str(vllm), restarts=0)), base, base, Bell())
    assert caught.value.reason == "scorer.server"


def test_server_that_does_not_start_tells_its_last_words(vllm: Path, base: Path) -> None:
    serving = Serving(OpenAiConfig(program=str(vllm), arguments=("--no-such-flag",)))
    with pytest.raises(JobFailedError) as caught:
        scored(serving, base, base, Bell())
    assert caught.value.reason == "scorer.server"
    assert "--no-such-flag" in caught.value.detail


def test_whole_weights_cannot_be_given_to_a_server_of_others(base: Path, tmp_path: Path) -> None:
    serving = Serving(OpenAiConfig(kind="url", url="http://127.0.0.1:9/v1"))
    folder = trained(base, tmp_path / "model", adapter=False)
    with pytest.raises(JobFailedError) as caught:
        scored(serving, base, folder, Bell())
    assert caught.value.reason == "scorer.refused"


def test_missing_program_is_a_config_error(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"prime-rl\.md"):
        Serving(OpenAiConfig(program="no-such-vllm")).fingerprint()
