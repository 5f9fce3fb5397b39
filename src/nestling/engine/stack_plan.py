"""How much memory a stack of jobs needs, counted before it is taken.

Every number is bytes of device memory. What the planner counts is what the engine allocates; the allocator's own
waste and the libraries' workspaces are covered by `SPARE`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import psutil
import torch

from nestling.core.errors import ConfigError
from nestling.engine.checkpoint import load_config
from nestling.engine.config import ModelConfig
from nestling.engine.lora import LoraConfig, LoraWeights
from nestling.engine.weights import num_parameters

__all__ = ["SPARE", "Precision", "StackShape", "free_bytes", "shape_table"]

SPARE: Final = 0.1
"""Share of the free memory that is left alone."""

Precision = Literal["float32", "tf32", "bfloat16"]

_OPTIMISER_COPIES: Final = {"adamw": 2, "muon": 2, "sgd": 1, "sign_sgd": 0}
_LARGE_BUDGET: Final = 16 * 2**30
_LEAST_TILE_TOKENS: Final = 8192
_MOST_TILE_TOKENS: Final = 2**17
_LEAST_TILE_ROWS: Final = 8
_MOST_TILE_ROWS: Final = 32
_LANE_STATE_BYTES: Final = 8 + 4 + 4 + 1  # id, random number, log-probability, sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """Sizes of a stack of one base model."""

    config: ModelConfig
    num_lanes: int
    """Jobs that are decoded at the same time."""
    num_rows: int
    """Conversations of one job at a time; further ones wait for a free row."""
    max_len: int
    """Tokens of a conversation at most."""
    precision: Precision = "float32"
    """Of decoding; with bfloat16 training multiplies in it too. Master weights stay float32."""
    tile_tokens: int = 8192
    """Tokens of a training launch; one tile of one job may be more only when a single row is."""
    tile_rows: int = 8
    """Rows of a tile, see `stack_train.TilePlan`."""

    @classmethod
    def for_base(
        cls,
        folder: Path,
        *,
        num_lanes: int,
        num_rows: int,
        max_len: int,
        precision: Precision,
        tile_tokens: int,
        budget: int,
    ) -> StackShape:
        """Sizes for the model in a folder, within a budget of bytes.

        Rows are cut to the positions that the model knows. `tile_tokens = 0` takes what a quarter of the budget
        holds, at most 131072 and, so that a CPU's caches are not left, 8192 below a budget of 16 GiB.
        """
        config = load_config(folder)
        shape = cls(
            config=config,
            num_lanes=num_lanes,
            num_rows=num_rows,
            max_len=min(max_len, config.max_positions),
            precision=precision,
        )
        most = _MOST_TILE_TOKENS if budget >= _LARGE_BUDGET else _LEAST_TILE_TOKENS
        tokens = tile_tokens or max(1, min(most, budget // 4 // shape.token_bytes()))
        rows = _MOST_TILE_ROWS if tokens > _LEAST_TILE_TOKENS else _LEAST_TILE_ROWS
        while rows > 1 and rows * shape.max_len > tokens:
            rows //= 2
        return replace(shape, tile_tokens=tokens, tile_rows=rows)

    @property
    def item_bytes(self) -> int:
        """Of one number of the decoder's weights and cache."""
        return 2 if self.precision == "bfloat16" else 4

    @property
    def dtype(self) -> torch.dtype:
        """Of the decoder."""
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32

    def lane_bytes(self) -> int:
        """Weights, cache and tokens of one lane."""
        config = self.config
        cached = 2 * config.num_layers * config.kv_size * self.max_len * self.item_bytes
        state = (self.max_len + 1) * _LANE_STATE_BYTES + 64
        return num_parameters(config) * self.item_bytes + self.num_rows * (cached + state)

    def job_bytes(self, optimiser: str, lora: LoraConfig | None = None) -> int:
        """Trained float32 numbers and what the optimiser keeps of them."""
        return 4 * _trained(self.config, lora) * (1 + _OPTIMISER_COPIES[optimiser])

    def token_bytes(self) -> int:
        """That the backward pass keeps of one trained token.

        The inputs of every projection and norm, rotated heads and the gates, in the type of the products; and
        float32 logits with their gradient, as if every token were predicted.
        """
        config = self.config
        layer = 6 * config.hidden_size + 4 * config.q_size + 4 * config.kv_size
        layer += 5 * config.intermediate_size
        inner = config.num_layers * layer + 4 * config.hidden_size
        return self.item_bytes * inner + 4 * 3 * config.vocab_size

    def launch_bytes(self, jobs: int = 1, lora: LoraConfig | None = None) -> int:
        """Peak of one training launch: copies of weights and gradients, and what the backward pass keeps."""
        copies = 4 if jobs > 1 else 2
        tokens = max(self.tile_tokens, self.tile_rows * self.max_len)
        return copies * 4 * jobs * _trained(self.config, lora) + tokens * self.token_bytes()

    def launch_jobs(self, budget: int) -> int:
        """Jobs whose gradients are computed together: as many as keep the copies below a tenth of the budget."""
        return max(1, min(64, budget // 10 // (16 * num_parameters(self.config))))

    def step_bytes(self, lanes: int) -> int:
        """Peak of one decode step: float32 logits through sampling, and attention scores of one layer."""
        scores = 3 * self.config.num_heads * self.max_len
        return 4 * lanes * self.num_rows * (5 * self.config.vocab_size + scores)

    def fixed_bytes(self, lanes: int, budget: int) -> int:
        """What a stack holds without any job: base, lanes, and the peak of a decode step or a training launch."""
        launch = self.launch_bytes(min(lanes, self.launch_jobs(budget)))
        peak = max(launch, self.step_bytes(lanes))  # the two take turns
        return 4 * num_parameters(self.config) + lanes * self.lane_bytes() + peak

    def total_bytes(self, lanes: int, budget: int) -> int:
        """With a job on every lane that trains all weights by AdamW."""
        return self.fixed_bytes(lanes, budget) + lanes * self.job_bytes("adamw")

    def fitting(self, budget: int) -> int:
        """Lanes, at most `num_lanes`, that fit into `budget` bytes with a full job on each.

        Raises:
            ConfigError: not even one fits.
        """
        for lanes in range(self.num_lanes, 0, -1):
            if self.total_bytes(lanes, budget) <= budget:
                return lanes
        needed = self.total_bytes(1, budget)
        raise ConfigError(
            f"one job of {self.num_rows} rows x {self.max_len} tokens needs {needed / 2**20:.0f} MiB, "
            f"{budget / 2**20:.0f} MiB are free; expected room for one; lower "
            "inner.stack.rows_per_job or inner.stack.max_len, or use another device"
        )


def free_bytes(device: torch.device) -> int:
    """Memory that new buffers may take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * (1 - SPARE))
    return int(psutil.virtual_memory().available * (1 - SPARE))


def shape_table(shape: StackShape, budget: int) -> dict[str, int]:
    """Named bytes of a shape, for tables and benchmarks."""
    jobs = min(shape.num_lanes, shape.launch_jobs(budget))
    return {
        "lane": shape.lane_bytes(),
        "job_adamw": shape.job_bytes("adamw"),
        "launch": shape.launch_bytes(jobs),
        "step": shape.step_bytes(shape.num_lanes),
        "tile_tokens": shape.tile_tokens,
        "total": shape.total_bytes(shape.num_lanes, budget),
    }


def _trained(config: ModelConfig, lora: LoraConfig | None) -> int:
    return num_parameters(config) if lora is None else LoraWeights.size(config, lora)
