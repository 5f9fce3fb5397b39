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

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.engine.config import ModelConfig
from nestling.engine.model import KVCache, rotary_tables
from nestling.engine.params import Linear, Params
from nestling.engine.shared_prompts import PromptPlan, SharedPrompts

__all__ = ["CpuStep"]

_BLOCK_TOKENS = 512
"""Prefill works on about this many tokens at a time, so that activations stay in the processor's cache."""


class _Layer(NamedTuple):
    qkv: Tensor  # [D, (H + 2K) d]
    qkv_bias: Tensor | None
    attn_out: Tensor  # [H d, D]
    gate_up: Tensor  # [D, 2F]
    down: Tensor  # [F, D]


class CpuStep:
    """`extend` and `decode` of `model`, for J = 1 in float32 on the CPU; see `fits`."""

    def __init__(
        self, params: Params, config: ModelConfig, cache: KVCache, max_len: int | None = None
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
            self._row = torch.arange(cache.num_rows)
            self._place = torch.arange(longest)

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
    def decode(self, token: Tensor, position: Tensor, width: int) -> Tensor:
        """As `model.decode` for token, position [R] of the first R cache rows; logits [R, V].

        The result lives in a buffer of the next call.
        """
        config, R = self.config, token.shape[0]
        H, K, d = config.num_heads, config.num_kv_heads, config.head_dim
        groups, row = H // K, self._row[:R]
        plan = self.prompts.plan(R)
        first = 0 if plan is None else plan.start
        mask = self._mask(position, width, plan)
        turn = self._turn[position]
        x = self._embed[token]
        for i, layer in enumerate(self._layers):
            turned, v = self._heads(x, layer, turn)
            keys, values = self.cache.keys[i], self.cache.values[i]
            keys[row, :, position] = turned[:, H:]
            values[row, :, position] = v
            query = turned[:, :H].reshape(R * K, groups, d)
            seen = keys[:R].view(R * K, -1, d)[:, first:width]
            scores = torch.bmm(query, seen.transpose(1, 2)).view(R, H, width - first)
            if plan is not None:
                scores = torch.cat((plan.scores(i, turned[:, :H]), scores), -1)
            if mask is not None:
                scores.add_(mask)
            shares = torch.softmax(scores, -1, out=scores)
            own = shares[..., -(width - first) :].reshape(R * K, groups, width - first)
            y = torch.bmm(own, values[:R].view(R * K, -1, d)[:, first:width]).view(R, H, d)
            if plan is not None:
                y += plan.mixed(i, shares[..., : -(width - first)])
            x.addmm_(y.view(R, H * d), layer.attn_out)
            self._feed_forward(x, layer)
        return torch.mm(self._normed(x), self._head)

    def _mask(self, position: Tensor, width: int, plan: PromptPlan | None) -> Tensor | None:
        """[R, 1, keys]: minus infinity where a row has no key; None when all see the same ones."""
        first = 0 if plan is None else plan.start
        ragged_prompts = plan is not None and plan.mask is not None
        if int(position.min()) == width - 1 and not ragged_prompts:
            return None
        place = self._place[first:width]
        hidden = place > position[:, None]
        if plan is not None:
            hidden |= place < plan.given[:, None]
        mask = torch.zeros(len(position), 1, width - first)
        mask.masked_fill_(hidden[:, None], -math.inf)
        if plan is None:
            return mask
        prompt = plan.mask
        if prompt is None:
            prompt = mask.new_zeros(len(position), 1, plan.start)
        return torch.cat((prompt, mask), -1)

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
        x = self._embed[ids.reshape(-1)]
        for i, layer in enumerate(self._layers):
            turned, v = self._heads(x, layer, turn)
            keys, values = self.cache.keys[i], self.cache.values[i]
            k, v = turned[:, H:].view(b, T, K, d), v.view(b, T, K, d)
            keys[rows[:, None], :, positions] = k
            values[rows[:, None], :, positions] = v
            if i == len(self._layers) - 1:
                return
            if visible is None:
                k, v = k.transpose(1, 2), v.transpose(1, 2)
            else:
                k, v = keys[rows, :, :width], values[rows, :, :width]
            y = F.scaled_dot_product_attention(
                turned[:, :H].view(b, T, H, d).transpose(1, 2),
                k,
                v,
                attn_mask=visible,
                is_causal=visible is None,
                scale=1.0,
                enable_gqa=H != K,
            )
            x.addmm_(y.transpose(1, 2).reshape(b * T, H * d), layer.attn_out)
            self._feed_forward(x, layer)

    def _heads(self, x: Tensor, layer: _Layer, turn: Tensor) -> tuple[Tensor, Tensor]:
        """Turned queries and keys [N, H + K, d] and values [N, K, d] of x [N, D]."""
        config, N = self.config, x.shape[0]
        H, K, d = config.num_heads, config.num_kv_heads, config.head_dim
        normed = self._normed(x)
        if layer.qkv_bias is None:
            fused = torch.mm(normed, layer.qkv)
        else:
            fused = torch.addmm(layer.qkv_bias, normed, layer.qkv)
        fused = fused.view(N, H + 2 * K, d)
        pairs = torch.view_as_complex(fused.view(N, H + 2 * K, d // 2, 2)[:, : H + K])
        return torch.view_as_real(pairs * turn).view(N, H + K, d), fused[:, H + K :]

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
        qkv = _merged(layer.qkv)
        bias = None if layer.qkv.bias is None else layer.qkv.bias[0]
        order = torch.arange((H + 2 * K) * d)
        turned = order[: (H + K) * d].view(H + K, 2, d // 2).transpose(1, 2)
        order[: (H + K) * d] = turned.reshape(-1).clone()
        scale = torch.ones((H + 2 * K) * d, 1)
        scale[: H * d] = d**-0.5
        return _Layer(
            qkv=_transposed((qkv * scale)[order], layer.attn_norm),
            qkv_bias=None if bias is None else (bias * scale[:, 0])[order],
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
