"""Models and sizes of the `gpu` benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch

from nestling.core.errors import ConfigError
from nestling.engine.checkpoint import save_model
from nestling.engine.config import ModelConfig
from nestling.engine.model import Model
from nestling.engine.stack_plan import Precision
from nestling.engine.tokenizer import Tokenizer
from nestling.engine.weights import Weights
from nestling.families.bases import get, names

__all__ = ["LITTLE", "RANDOM_SHAPES", "Sizes", "folder_of"]

RANDOM_SHAPES: Final = {
    # SmolLM2-135M's config.json (Hugging Face, HuggingFaceTB/SmolLM2-135M); speed does not depend on the weights.
    "smollm2-135m": ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=100000.0,
        rms_eps=1e-5,
        max_positions=8192,
    ),
    "toy": ModelConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
    ),
}
"""Shapes with random weights; `toy` is for tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything."""

    shapes: tuple[str, ...] = ("nano", "micro", "smollm2-135m")
    rows: int = 256
    """Conversations that are decoded at the same time."""
    prompt_tokens: int = 64
    new_tokens: int = 64
    turns: int = 4
    tool_tokens: int = 12
    rollouts: int = 128
    """Of a GRPO step of one job."""
    group_size: int = 8
    stacked: tuple[int, ...] = (1, 8, 40)
    """Jobs of one stack."""
    steps: int = 5
    """GRPO steps that are counted, after one that is not."""
    runs: int = 5
    peer_runs: int = 2
    """A peer's decode takes seconds a run; one more is not counted."""
    jobs: int = 40
    """Of the batch of whole jobs on one device."""
    job_steps: int = 10
    eval_items: int = 200
    workers: int = 40
    processes: int = 2
    """Stack processes of a device, for whole jobs."""
    batches: int = 5
    """Batches of whole jobs that are counted, after one that is not."""
    precisions: tuple[Precision, ...] = ("float32", "tf32", "bfloat16")

    @property
    def turn_tokens(self) -> int:
        """Sampled in one turn of a multi-turn row."""
        return self.new_tokens // self.turns

    @property
    def max_len(self) -> int:
        """Tokens of a multi-turn row."""
        return self.prompt_tokens + self.new_tokens + (self.turns - 1) * self.tool_tokens


LITTLE: Final = Sizes(
    shapes=("nano",),
    rows=16,
    rollouts=16,
    stacked=(1, 2),
    steps=2,
    runs=2,
    peer_runs=1,
    jobs=2,
    job_steps=2,
    eval_items=20,
    workers=2,
    processes=1,
    batches=1,
    precisions=("float32",),
)
"""What a laptop does in a minute or two: it shows that everything runs, not how fast a GPU is."""


@contextmanager
def folder_of(shape: str) -> Iterator[Path]:
    """A model folder: of a shipped base, or written with random weights."""
    if shape in names():
        yield get(shape).folder
        return
    if shape not in RANDOM_SHAPES:
        known = ", ".join([*names(), *RANDOM_SHAPES])
        raise ConfigError(f"no shape {shape!r}; expected one of {known}")
    config = RANDOM_SHAPES[shape]
    words = Tokenizer.closed(["a", "b"])
    weights = Weights.init(config, 1, torch.Generator().manual_seed(0))
    with TemporaryDirectory(prefix="nestling-shape-") as folder:
        save_model(folder, Model(config=config, weights=weights, tokenizer=words))
        yield Path(folder)
