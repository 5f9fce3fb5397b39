"""The scorer against a real vLLM, on a GPU or a processor.

NESTLING_VLLM names its command, such as `.venv/bin/vllm` of an environment of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from nestling.core.seeds import derive_seed
from nestling.engine.checkpoint import load_model, save_model
from nestling.engine.lora import LoraConfig, LoraWeights, save_adapter
from nestling.families import bases
from nestling.families.hidden_taskset import hidden_taskset
from nestling.families.item_play import EVAL_SAMPLING
from nestling.families.splits import dev_items
from nestling.inner.openai_config import OpenAiConfig
from nestling.inner.openai_serving import Serving
from nestling.inner.pinned_base import PinnedBase
from nestling.jobs.rollout_env import CallRequest, FinalRequest, ScoreRecord
from nestling.jobs.verifiers_host import VerifiersHost

VLLM = os.environ.get("NESTLING_VLLM", "")
pytestmark = [
    pytest.mark.skipif(not VLLM, reason="NESTLING_VLLM names no vLLM command"),
    pytest.mark.timeout(900),
]
N = 24


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    config = OpenAiConfig(
        program=VLLM,
        keep=True,
        temperature=0.0,
        arguments=("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "32"),
    )
    with closing(Serving(config)) as serving:
        yield serving


def moved(base: Path, folder: Path) -> Path:
    """A copy that another adapter changed enough to speak otherwise."""
    model = load_model(base)
    lora = LoraWeights.init(model.config, LoraConfig(rank=8))
    lora.flat += 0.004
    save_model(folder, replace(model, weights=lora.merged(model.weights)))
    save_adapter(folder / "adapter", lora)
    return folder


class Heard(VerifiersHost):
    """The scorer's own environment, keeping the last turns and who made calls before."""

    def __init__(self) -> None:
        super().__init__(hidden_taskset("ledger", dev_items("ledger", N)))
        self.finals: list[tuple[str, str]] = []
        self.callers: set[int] = set()
        self.several_turns = 0

    def step(self, calls: Sequence[CallRequest]) -> list[str | None]:
        self.callers |= {call.rollout_id for call in calls}
        return super().step(calls)

    def score(self, finals: Sequence[FinalRequest]) -> list[ScoreRecord]:
        self.finals += [(final.text, final.stop) for final in finals]
        self.several_turns += sum(
            bool(final.text) and final.rollout_id in self.callers for final in finals
        )
        return super().score(finals)


def test_vllm_serves_base_and_adapter_and_repeats_itself(serving: Serving, tmp_path: Path) -> None:
    """Arguments, request fields, adapter routes and replies, all of the real one.

    Its text is not held against our own sampling: it tokenizes the rendered history, and the shipped vocabularies, the
    only models at hand everywhere, have tokens that join the end of a turn with what follows.
    """
    base = PinnedBase(bases.get("nano").folder)
    trained = moved(base.folder, tmp_path / "model")
    seeds = [derive_seed(1, index) for index in range(N)]
    heard = []
    for folder in (base.folder, trained, base.folder):
        with closing(Heard()) as env:
            scores = serving.play(
                base, "nano", folder, base.load_trained(folder), env, seeds, EVAL_SAMPLING
            )
        assert [score.error for score in scores] == [None] * N
        heard.append(env.finals)
    assert heard[0] == heard[2]
    assert heard[0] != heard[1]
    assert sum(text.startswith("ANSWER: ") for text, _ in heard[0]) > N / 2
    assert env.several_turns > 0
    assert serving.restarts == 0
