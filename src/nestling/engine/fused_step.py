"""One decode step of several lanes in a few launches, by the kernels of `triton_step`.

Axes as in `lane_decoder`. The layouts it serves are those without biases, head norms and windows (Llama, SmolLM2 and
the shipped bases); `FusedStep.serves` tells, and `lane_decoder` takes its general step for the others.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from nestling.engine.config import ModelConfig
from nestling.engine.model import KVCache, rotary_tables
from nestling.engine.weights import layout

__all__ = ["FusedStep", "RowBuffers"]

_WIDEST_EXACT = 256
"""Hidden sizes above this leave exact float32 products to the library."""
_FULL = 132
"""Programs that fill the GPU once: the multiprocessors of an H100 or H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBuffers:
    """What a step reads and writes of each row; see `lane_decoder`."""

    ids: Tensor
    """[R, W], as are the next three."""
    sampled: Tensor
    logp: Tensor
    uniforms: Tensor
    temperature: Tensor
    """[R, 1]"""
    state: Tensor
    """[6, R]: length, active, known, limit, turn start, turn limit."""


class FusedStep:
    """The step over the buffers of a `LaneDecoder`; nothing it reads or writes ever moves."""

    def __init__(
        self,
        config: ModelConfig,
        flat: Tensor,
        cache: KVCache,
        rows: RowBuffers,
        *,
        num_rows: int,
        turn_end_id: int,
    ) -> None:
        from nestling.engine import triton_step  # comes with torch for CUDA only

        self._kernels = triton_step
        self._config, self._flat, self._cache, self._rows = config, flat, cache, rows
        self._num_rows, self._turn_end_id = num_rows, turn_end_id
        device, kind = flat.device, flat.dtype
        R, self._width = rows.ids.shape
        self._at = {slot.name: slot.offset for slot in layout(config)}
        cos, sin = rotary_tables(config, cache.max_len)
        self._cos, self._sin = (one.reshape(cache.max_len, -1).to(device) for one in (cos, sin))
        self._vocab_tile = 128 if config.vocab_size > 4096 else 64
        self._tiles = -(-config.vocab_size // self._vocab_tile)
        self._x = torch.zeros(R, config.hidden_size, device=device)
        self._qkv = torch.zeros(R, config.q_size + 2 * config.kv_size, device=device, dtype=kind)
        self._y = torch.zeros(R, config.q_size, device=device, dtype=kind)
        self._gated = torch.zeros(R, config.intermediate_size, device=device, dtype=kind)
        self._logits = torch.zeros(R, self._tiles * self._vocab_tile, device=device)
        self._peak = torch.zeros(R, self._tiles, device=device)
        self._mass = torch.zeros(R, self._tiles, device=device)
        tf32 = torch.get_float32_matmul_precision() != "highest"
        self._precision = "tf32" if tf32 or kind != torch.float32 else "ieee"

    @staticmethod
    def serves(config: ModelConfig, dtype: torch.dtype) -> bool:
        """Whether the kernels can be had, know this layout, and are the faster way.

        Full float32 products have no matrix units to use; above a small width the library's are faster (SmolLM2-135M on an
        H200, 256 rows: 35,000 tokens a second, against 19,000 by these kernels).
        """
        is_exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
        if is_exact and config.hidden_size > _WIDEST_EXACT:
            return False
        is_plain = config.gemma is None and not config.qk_norm and not config.attention_bias
        fits = (
            config.head_dim in (16, 32, 64, 128) and config.num_heads // config.num_kv_heads <= 16
        )
        return is_plain and fits and importlib.util.find_spec("triton") is not None

    def step(self, first: int, last: int) -> None:
        """Append one token to the active rows of lanes first..last-1."""
        config, rows, kernels = self._config, self._rows, self._kernels
        S, P, lanes = self._num_rows, self._flat.shape[1], last - first
        count, D = lanes * S, config.hidden_size
        length, active = rows.state[0], rows.state[1]
        kernels.begin[(count,)](
            rows.ids, length, active, self._flat, self._x, first,
            W=self._width, S=S, P=P, D=D, BLOCK=min(512, _power(D)), num_warps=1,
        )  # fmt: skip
        for i in range(config.num_layers):
            name = f"layers.{i}."
            self._project(self._x, self._qkv, name + "qkv", first, lanes, norm=name + "attn_norm")
            self._attend(i, first, count)
            self._project(self._y, self._x, name + "attn_out", first, lanes, added=True)
            self._project(
                self._x, self._gated, name + "gate_up", first, lanes,
                norm=name + "mlp_norm", gated=True,
            )  # fmt: skip
            self._project(self._gated, self._x, name + "down", first, lanes, added=True)
        self._head(first, lanes)
        kernels.sample[(count,)](
            self._logits, self._peak, self._mass, rows.temperature, rows.uniforms, rows.ids,
            rows.sampled, rows.logp, rows.state, first, self._turn_end_id,
            R=rows.state.shape[1], S=S, W=self._width, V=config.vocab_size, T=self._tiles,
            TILES=_power(self._tiles), BN=self._vocab_tile, num_warps=1,
        )  # fmt: skip

    def _project(
        self,
        source: Tensor,
        target: Tensor,
        weight: str,
        first: int,
        lanes: int,
        *,
        norm: str = "",
        gated: bool = False,
        added: bool = False,
    ) -> None:
        S, IN, OUT = self._num_rows, source.shape[1], target.shape[1]
        tile = self._tile(IN, 2 * OUT if gated else OUT, lanes)
        self._kernels.project[(-(-OUT // tile.outputs), -(-S // tile.rows), lanes)](
            source, self._flat, target, self._rows.state[1], first, self._config.rms_eps,
            self._at[weight], self._at.get(norm, 0),
            S=S, P=self._flat.shape[1], IN=IN, OUT=OUT, NORMED=bool(norm), GATED=gated, ADDED=added,
            PRECISION=self._precision,
            EVEN=not (S % tile.rows or OUT % tile.outputs or IN % tile.inputs),
            BM=tile.rows, BN=tile.outputs, BK=tile.inputs, num_warps=tile.warps, num_stages=4,
        )  # fmt: skip

    def _attend(self, layer: int, first: int, count: int) -> None:
        config, rows = self._config, self._rows
        heads, kv, d = config.num_heads, config.num_kv_heads, config.head_dim
        self._kernels.attend[(count, kv)](
            self._qkv, self._cache.keys[layer], self._cache.values[layer], self._y,
            rows.state[0], rows.state[1], self._cos, self._sin, first, config.query_scale,
            S=self._num_rows, H=heads, K=kv, d=d, MAX_LEN=self._cache.max_len,
            GROUP=1 if heads == kv else 16, PRECISION=self._precision,
            BW=64, num_warps=2 if heads == kv else 4,
        )  # fmt: skip

    def _head(self, first: int, lanes: int) -> None:
        config, S = self._config, self._num_rows
        D, V = config.hidden_size, config.vocab_size
        name = "embed" if config.tie_embeddings else "lm_head"
        tile, BN = self._tile(D, V, lanes), self._vocab_tile
        self._kernels.head[(-(-S // tile.rows), self._tiles, lanes)](
            self._x, self._flat, self._logits, self._peak, self._mass, self._rows.temperature,
            self._rows.state[1], first, config.rms_eps, self._at[name], self._at["final_norm"],
            S=S, P=self._flat.shape[1], D=D, V=V, T=self._tiles, PRECISION=self._precision,
            EVEN=not (S % tile.rows or V % BN or D % tile.inputs),
            BM=tile.rows, BN=BN, BK=tile.inputs, num_warps=4, num_stages=3,
        )  # fmt: skip

    def _tile(self, inputs: int, outputs: int, lanes: int) -> _Tile:
        """Large tiles read less; small ones share out what little there is to do.

        The choice is the fastest of twelve on an H200 for the shapes of micro (1 lane of 256 rows, 40 of 128) and
        of SmolLM2-135M (1 of 256), within a tenth.
        """

        def programs(rows: int, width: int) -> int:
            return -(-self._num_rows // rows) * -(-outputs // width) * lanes

        is_short = self._flat.dtype == torch.bfloat16
        if programs(64, 64) >= _FULL:
            return _Tile(rows=64, outputs=64, inputs=64 if is_short else 32, warps=4)
        if inputs >= 256 and programs(64, 32) >= _FULL // 2:
            return _Tile(rows=64, outputs=32, inputs=64, warps=4)
        return _Tile(rows=16, outputs=32, inputs=64, warps=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """What one program of a product computes, and how much of the inner axis it takes at a time."""

    rows: int
    outputs: int
    inputs: int
    warps: int


def _power(value: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, value - 1).bit_length()
