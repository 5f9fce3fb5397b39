"""Prefill and decode of one job on a CPU, over weights arranged for it.

Axes: N row (or token) of a matrix product, R row, T token, H query head, K key/value head, D hidden, d head,
V vocabulary. `prepare` does once what `model.decode` would do at every step: norms and the attention scale are
multiplied into the projections, adapters are merged, weights are transposed, and the two halves that rotary
positions turn together are made neighbours, so that turning is one complex product. Results differ from
`model.decode` by rounding alone. Cached keys hold `d` in the other order: one cache belongs to one of the two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.engine.config import ModelConfig
from nestling.engine.cpu_cache import CpuCache
from nestling.engine.model import rotary_tables
from nestling.engine.params import Linear, Params, rotary_neighbours
from nestling.engine.shared_prompts import PromptPlan, SharedPrompts

__all__ = ["CpuStep"]

_Indices = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float32]

_BLOCK_TOKENS = 512
"""Prefill works on about this many tokens at a time, so that activations stay in the processor's cache."""


class _Layer(NamedTuple):
    qkv: Tensor  # [D, (H + 2K) d]
    qkv_bias: Tensor | None
    attn_out: Tensor  # [H d, D]
    gate_up: Tensor  # [D, 2F]
    down: Tensor  # [F, D]


class _Buffers:
    """What a decode step of R rows writes into, as tensors and as arrays of the same memory."""

    def __init__(self, config: ModelConfig, R: int) -> None:
        H, K, d = config.num_heads, config.num_kv_heads, config.head_dim
        D, F = config.hidden_size, config.intermediate_size
        self.x, self.normed = torch.empty(R, D), torch.empty(R, D)
        self.x_array, self.normed_array = self.x.numpy(), self.normed.numpy()
        self.inverse = np.empty((R, 1), np.float32)
        self.qkv = torch.empty(R, (H + 2 * K) * d)
        heads = self.qkv.view(R, H + 2 * K, d)
        self.pairs = torch.view_as_complex(heads.view(R, H + 2 * K, d // 2, 2)[:, : H + K])
        self.query = heads.numpy()[:, :H].reshape(R, K, H // K, d)
        self.fresh = heads.numpy()[:, H:].reshape(R, 2, K, d)
        """Keys and values."""
        self.y = torch.empty(R, H * d)
        self.mixed = self.y.numpy().reshape(R, K, H // K, d)
        self.gate_up, self.act = torch.empty(R, 2 * F), torch.empty(R, F)
        self.gate, self.up = self.gate_up.chunk(2, -1)
        self.logits = torch.empty(R, config.vocab_size)


class CpuStep:
    """`extend` and `decode` of `model`, for J = 1 in float32 on the CPU; see `fits`."""

    def __init__(
        self, params: Params, config: ModelConfig, cache: CpuCache, max_len: int | None = None
    ) -> None:
        """`max_len`: positions there can be, where the cache may grow to them later."""
        self.config, self.cache = config, cache
        self.prompts = SharedPrompts(cache)
        longest = max_len or cache.max_len
        with torch.inference_mode():
            self._embed = params.embed[0]
            self._layers = [self._arrange(params, i) for i in range(config.num_layers)]
            self._head = _transposed(_merged(params.head), params.final_norm)
            cos, sin = rotary_tables(config, longest)
            self._turn = torch.complex(cos, sin)  # [max_len, 1, d/2]
            self._eps = torch.tensor(config.rms_eps)
            self._place = torch.arange(longest)
        self._used: _Buffers | None = None

    @staticmethod
    def fits(params: Params, config: ModelConfig) -> bool:
        """Whether this class can compute what `model.decode` would for these parameters."""
        embed = params.embed
        plain = (
            config.gemma is None
            and embed.device.type == "cpu"
            and embed.dtype == torch.float32
            and embed.shape[0] == 1
        )
        adapters = [one for layer in params.layers for one in layer.qkv.adapters]
        return plain and not config.qk_norm and all(one.up.shape[0] == 1 for one in adapters)

    @torch.inference_mode()
    def extend(self, ids: Tensor, start: Tensor, rows: Tensor) -> None:
        """As `model.extend` for ids [b, T], start [b], rows [b]."""
        count = max(1, _BLOCK_TOKENS // ids.shape[1])
        for first in range(0, ids.shape[0], count):
            block = slice(first, first + count)
            self._extend(ids[block], start[block], rows[block])

    @torch.inference_mode()
    @np.errstate(over="ignore", invalid="ignore")  # weights that have diverged are for the caller
    def decode(self, token: Tensor, position: Tensor, width: int) -> Tensor:
        """As `model.decode` for token, position [R] of the first R cache rows; logits [R, V].

        The result lives in a buffer of the next call.
        """
        R, place = token.shape[0], position.numpy()
        if self._used is None or len(self._used.x) != R:
            self._used = _Buffers(self.config, R)
        used, plan = self._used, self.prompts.plan(R)
        first, given = (0, 0) if plan is None else (plan.start, plan.width)
        mask = self._mask(place, width, plan)
        weights = torch.empty(*used.query.shape[:3], given + width - first)
        shares = weights.numpy()  # [R, K, H/K, keys]
        own = shares[..., given:]
        same_place = place.min() == width - 1
        turn = self._turn[width - 1] if same_place else self._turn[position]
        row = np.arange(R)
        torch.index_select(self._embed, 0, token, out=used.x)
        for i, layer in enumerate(self._layers):
            self._norm(used)
            if layer.qkv_bias is None:
                torch.mm(used.normed, layer.qkv, out=used.qkv)
            else:
                torch.addmm(layer.qkv_bias, used.normed, layer.qkv, out=used.qkv)
            used.pairs.mul_(turn)
            cached = self.cache.arrays[i]  # [2, rows, K, L, d]
            if same_place:
                cached[:, :R, :, width - 1] = used.fresh.swapaxes(0, 1)
            else:
                cached[:, row, :, place] = used.fresh
            seen = cached[:, :R, :, first:width]
            np.matmul(used.query, seen[0].swapaxes(2, 3), out=own)
            if plan is not None:
                plan.score(i, used.query, shares)
            if mask is not None:
                shares += mask
            torch.softmax(weights, -1, out=weights)
            np.matmul(own, seen[1], out=used.mixed)
            if plan is not None:
                plan.mix(i, shares, used.mixed)
            used.x.addmm_(used.y, layer.attn_out)
            self._norm(used)
            torch.mm(used.normed, layer.gate_up, out=used.gate_up)
            torch.ops.aten.silu.out(used.gate, out=used.act)
            used.x.addmm_(used.act.mul_(used.up), layer.down)
        self._norm(used)
        return torch.mm(used.normed, self._head, out=used.logits)

    def _norm(self, used: _Buffers) -> None:
        """Put x over its root mean square into `normed`; numpy's calls cost a fraction of torch's."""
        inverse = used.inverse
        np.vecdot(used.x_array, used.x_array, out=inverse[:, 0])
        inverse /= used.x_array.shape[1]
        inverse += self.config.rms_eps
        np.sqrt(inverse, out=inverse)
        np.divide(used.x_array, inverse, out=used.normed_array)

    def _mask(self, place: _Indices, width: int, plan: PromptPlan | None) -> _Floats | None:
        """[R, 1, 1, keys]: minus infinity where a row has no key; None when all see the same ones."""
        first = 0 if plan is None else plan.start
        ragged_prompts = plan is not None and plan.mask is not None
        if place.min() == width - 1 and not ragged_prompts:
            return None
        at = np.arange(first, width)
        hidden = at > place[:, None]
        if plan is not None:
            hidden |= at < plan.given[:, None]
        mask = np.where(hidden, np.float32(-math.inf), np.float32(0))
        if plan is not None:
            prompt = plan.mask
            if prompt is None:
                prompt = np.zeros((len(place), plan.width), np.float32)
            mask = np.concatenate((prompt, mask), 1)
        return mask[:, None, None]

    def _extend(self, ids: Tensor, start: Tensor, rows: Tensor) -> None:
        config = self.config
        b, T = ids.shape
        H, K, d = config.num_heads, config.num_kv_heads, config.head_dim
        width = int(start.max()) + T
        positions = start[:, None] + self._place[:T]  # [b, T]
        visible = None
        if width > T:
            visible = (self._place[:width] <= positions[:, :, None])[:, None]  # [b, 1, T, width]
        turn = self._turn[positions.reshape(-1)]
        row, place = rows.numpy(), positions.numpy()
        same_place = width == start.min() + T
        x = self._embed[ids.reshape(-1)]
        for i, layer in enumerate(self._layers):
            heads = self._heads(x, layer, turn).view(b, T, H + 2 * K, d)
            cached = self.cache.arrays[i]  # [2, rows, K, L, d]
            fresh = heads.numpy()[:, :, H:].reshape(b, T, 2, K, d)
            if same_place:
                cached[:, row, :, width - T : width] = fresh.transpose(2, 0, 3, 1, 4)
            else:
                cached[:, row[:, None], :, place] = fresh
            if i == len(self._layers) - 1:
                return
            q, k, v = torch.split(heads.transpose(1, 2), [H, K, K], 1)
            if visible is not None:
                k, v = self.cache.keys[i][rows, :, :width], self.cache.values[i][rows, :, :width]
            y = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=visible,
                is_causal=visible is None,
                scale=1.0,
                enable_gqa=H != K,
            )
            x.addmm_(y.transpose(1, 2).reshape(b * T, H * d), layer.attn_out)
            self._feed_forward(x, layer)

    def _heads(self, x: Tensor, layer: _Layer, turn: Tensor) -> Tensor:
        """Queries, keys and values [N, H + 2K, d] of x [N, D], the first two turned."""
        config, N = self.config, x.shape[0]
        H, K, d = config.num_heads, config.num_kv_heads, config.head_dim
        normed = self._normed(x)
        if layer.qkv_bias is None:
            fused = torch.mm(normed, layer.qkv)
        else:
            fused = torch.addmm(layer.qkv_bias, normed, layer.qkv)
        torch.view_as_complex(fused.view(N, H + 2 * K, d // 2, 2))[:, : H + K].mul_(turn)
        return fused.view(N, H + 2 * K, d)

    def _feed_forward(self, x: Tensor, layer: _Layer) -> None:
        """Add the feed-forward block to x [N, D]."""
        gate, up = torch.mm(self._normed(x), layer.gate_up).chunk(2, -1)
        x.addmm_(F.silu(gate).mul_(up), layer.down)

    def _normed(self, x: Tensor) -> Tensor:
        """X [N, D] over its root mean square; the norm's weight is in the next projection."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return x * inverse

    def _arrange(self, params: Params, index: int) -> _Layer:
        layer, config = params.layers[index], self.config
        H, K, d = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = rotary_neighbours(layer.qkv, config)
        scale = torch.ones((H + 2 * K) * d)
        scale[: H * d] = d**-0.5
        return _Layer(
            qkv=_transposed(_merged(qkv) * scale[:, None], layer.attn_norm),
            qkv_bias=None if qkv.bias is None else qkv.bias[0] * scale,
            attn_out=_transposed(_merged(layer.attn_out)),
            gate_up=_transposed(_merged(layer.gate_up), layer.mlp_norm),
            down=_transposed(_merged(layer.down)),
        )


def _merged(linear: Linear) -> Tensor:
    """Weight [O, D] with its adapters added."""
    weight = linear.weight[0]
    if not linear.adapters:
        return weight
    weight = weight.clone()
    for one in linear.adapters:
        rows = slice(one.start_row, one.start_row + one.up.shape[1])
        weight[rows].addmm_(one.up[0], one.down[0], alpha=one.scale)
    return weight


def _transposed(weight: Tensor, norm: Tensor | None = None) -> Tensor:
    """[D, O] of weight [O, D], its inputs multiplied by the norm before it."""
    scaled = weight if norm is None else weight * norm.view(1, -1)
    return scaled.t().contiguous()
