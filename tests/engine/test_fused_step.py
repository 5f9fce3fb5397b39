"""The kernels of a decode step, on a GPU or in Triton's interpreter, against the general step."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from nestling.engine.config import ModelConfig
from nestling.engine.decoder import row_uniforms
from nestling.engine.lane_decoder import LaneDecoder, LanePlan, NewRow
from nestling.engine.weights import Weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> Iterator[None]:
    """Triton decides when a kernel is declared whether it is interpreted."""
    before = os.environ.get("TRITON_INTERPRET")
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("triton", reason="Triton comes with torch for CUDA only")
    yield
    if before is None:
        os.environ.pop("TRITON_INTERPRET", None)


def _config(**changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "vocab_size": 90,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 16,
    }
    return ModelConfig.model_validate(values | changes)


def _play(
    config: ModelConfig, *, fused: bool, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Two lanes of three rows, two turns each; ids, sampled, log-probabilities and lengths."""
    plan = LanePlan(
        lanes_per_launch=2, steps_per_look=4, in_lockstep=False, captured=True, fused=fused
    )
    weights = Weights.init(config, 2, torch.Generator().manual_seed(3))
    decoder = LaneDecoder(
        config, 7, num_lanes=2, num_rows=3, max_len=32, device=DEVICE, dtype=dtype, plan=plan
    )
    for lane in range(2):
        decoder.load(lane, weights.flat[lane : lane + 1].to(DEVICE), 32)
    rng = np.random.default_rng(0)
    decoder.fill(
        [
            NewRow(
                row=row,
                prompt=rng.integers(0, config.vocab_size, 3 + row),
                uniforms=row_uniforms(row, 33),
                limit=20,
                turn_limit=4,
                temperature=0.0 if row in (2, 3) else 0.5 + row / 8,
            )
            for row in range(6)
            if row != 1  # a row that sleeps throughout
        ]
    )
    answered: set[int] = set()
    while decoder.active.any():
        decoder.launch([0, 1])
        ended = decoder.look()
        again = np.array([row for row in ended.tolist() if row not in answered], np.int64)
        if len(again):
            answered |= set(again.tolist())
            sizes = 1 + again % 4
            decoder.answer(again, sizes, np.arange(sizes.sum()) % config.vocab_size)
    ids, sampled, logp = decoder.tokens(np.arange(6))
    return ids, sampled, logp, decoder.length.copy()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heads": 6, "num_kv_heads": 2, "num_layers": 1, "tie_embeddings": False},
    ],
    ids=["one head each", "shared keys"],
)
def test_tokens_and_log_probabilities_are_those_of_the_general_step(
    changes: dict[str, object],
) -> None:
    config = _config(**changes)
    ids, sampled, logp, length = _play(config, fused=False, dtype=torch.float32)
    fused = _play(config, fused=True, dtype=torch.float32)
    assert sampled.sum() > 30
    assert np.array_equal(length, fused[3])
    assert np.array_equal(ids, fused[0])
    assert np.array_equal(sampled, fused[1])
    assert np.abs(logp - fused[2]).max() < 2e-5


def test_an_odd_layout_takes_the_general_step() -> None:
    from nestling.engine.fused_step import FusedStep

    wide = _config(hidden_size=512)
    assert FusedStep.serves(_config(), torch.float32)
    assert FusedStep.serves(wide, torch.bfloat16)
    assert not FusedStep.serves(wide, torch.float32)
    assert not FusedStep.serves(_config(qk_norm=True), torch.float32)
    assert not FusedStep.serves(_config(head_dim=24), torch.float32)


def test_kernels_that_cannot_be_built_leave_the_general_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    config = _config()
    expected = _play(config, fused=False, dtype=torch.float32)
    monkeypatch.setattr("nestling.engine.fused_step.FusedStep.step", no_compiler)
    found = _play(config, fused=True, dtype=torch.float32)
    assert "Failed to find C compiler" in caplog.text
    assert np.array_equal(expected[0], found[0])
