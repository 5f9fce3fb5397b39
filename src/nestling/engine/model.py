"""The decoder as pure functions of weights and token ids.

Axes: J job, B row of a job, T token, N = B*T, R = J*B, H query head, K key/value head, D hidden, d head, V
vocabulary. `forward` serves training (no cache), `extend` appends several tokens per row to a cache, `decode`
appends one. Weights may have J = 1 while activations have J > 1: that is a shared base under per-job adapters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.engine.config import ModelConfig
from nestling.engine.fused import geglu, rms_norm, split_rotary, swiglu
from nestling.engine.lora import LoraWeights
from nestling.engine.packed_attention import PackedGroup, packed_attention
from nestling.engine.params import Adapter, LayerParams, Linear, Params, bind, rotary_neighbours
from nestling.engine.weights import Weights

if TYPE_CHECKING:
    from nestling.engine.tokenizer import Tokenizer

__all__ = [
    "Dropout",
    "KVCache",
    "Model",
    "decode",
    "extend",
    "forward",
    "forward_packed",
    "logits",
    "rotary_tables",
]


class Dropout(NamedTuple):
    """Dropout on adapter inputs, from a generator of its own."""

    probability: float
    generator: torch.Generator


@dataclass(slots=True)
class Model:
    """Weights, tokenizer and how to compute: what a sampler or a trainer works on.

    Trainers update `weights` (or `lora`) in place, so a sampler that holds the same model is always on policy.
    """

    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer
    lora: LoraWeights | None = None
    compute_dtype: torch.dtype = field(default=torch.float32)
    """Type of the matrix products; bfloat16 is meant for CUDA. Log-probabilities are float32 always."""

    @property
    def num_jobs(self) -> int:
        """J."""
        return self.lora.num_jobs if self.lora is not None else self.weights.num_jobs

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.flat.device

    def params(self) -> Params:
        """Detached tensors for sampling; float32 ones share the master's memory."""
        views = {name: view.detach() for name, view in self.weights.views().items()}
        adapters = None if self.lora is None else self.lora.adapters()
        return bind(self.config, views, adapters=adapters, dtype=self.cast)

    @property
    def cast(self) -> torch.dtype | None:
        """What `bind` casts weights to; None: they are float32 already."""
        return None if self.compute_dtype == torch.float32 else self.compute_dtype


class KVCache:
    """Keys and values of R = J*B rows, one static buffer [R, K, max_len, d] per layer."""

    def __init__(
        self,
        config: ModelConfig,
        num_rows: int,
        max_len: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (num_rows, config.num_kv_heads, max_len, config.head_dim)
        self.num_rows = num_rows
        self.max_len = max_len
        self.keys = [
            torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_layers)
        ]
        self.values = [torch.zeros_like(key) for key in self.keys]

    def move(self, source: Tensor, target: Tensor, width: int) -> None:
        """Copy the first `width` positions of rows `source` onto rows `target` (index tensors)."""
        for buffers in (self.keys, self.values):
            for buffer in buffers:
                buffer[target, :, :width] = buffer[source, :, :width]


def forward(
    params: Params, config: ModelConfig, ids: Tensor, *, dropout: Dropout | None = None
) -> Tensor:
    """Normed hidden states [J, B, T, D] of ids [J, B, T]; causal, padding on the right is harmless."""
    J, B, T = ids.shape
    ropes = _layer_ropes(config, T, ids.device, params.embed.dtype)
    place = torch.arange(T, device=ids.device)
    x = _embed(params.embed, ids.reshape(J, B * T), config)
    for i, layer in enumerate(params.layers):
        cos, sin = ropes[i]
        q, k, v = _split_heads(_qkv(x, layer, config, dropout), layer, config, (J * B, T), cos, sin)
        k, v = _repeat_kv(k, config), _repeat_kv(v, config)
        window = config.layer_window(i)
        seen = None if window is None or window >= T else _visible(place, T, window)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None, scale=config.query_scale
        )
        y = y.transpose(1, 2).reshape(J, B * T, config.q_size)
        x = x + _attention_out(y, layer, config, dropout)
        x = x + _feed_forward(x, layer, config, dropout)
    return rms_norm(x, params.final_norm, config.rms_eps).view(J, B, T, config.hidden_size)


def forward_packed(
    params: Params,
    config: ModelConfig,
    ids: Tensor,
    positions: Tensor,
    groups: Sequence[PackedGroup],
    pick: Tensor,
    *,
    dropout: Dropout | None = None,
) -> Tensor:
    """Normed hidden states [1, K, D] at the places pick [K] of packed tokens ids, positions [N].

    For J = 1 on the CPU, layouts without a window; `packing` makes the arguments. The last layer's
    feed-forward is computed at the picked places only.
    """
    cos, sin = _layer_ropes(
        config, int(positions.max()) + 1, ids.device, params.embed.dtype, positions
    )[0]  # one base: layouts with several have windows
    K = config.num_kv_heads
    plain = not config.qk_norm and cos.dtype != torch.bfloat16  # there are no complex numbers of it
    turn = torch.complex(cos, sin) if plain else None
    x = _embed(params.embed, ids[None], config)
    for i, layer in enumerate(params.layers):
        if turn is not None:
            paired = layer._replace(qkv=rotary_neighbours(layer.qkv, config))
            heads = _qkv(x, paired, config, dropout).view(1, len(ids), -1, config.head_dim)
            y = packed_attention(heads, turn, K, groups, config.query_scale)
        else:
            qkv = _qkv(x, layer, config, dropout)
            heads = torch.cat(_split_heads(qkv, layer, config, (1, len(ids)), cos, sin), 1)
            y = packed_attention(heads.transpose(1, 2), turn, K, groups, config.query_scale)
        if i == config.num_layers - 1:
            x, y = x.index_select(1, pick), y.index_select(1, pick)
        x = x + _attention_out(y, layer, config, dropout)
        x = x + _feed_forward(x, layer, config, dropout)
    return rms_norm(x, params.final_norm, config.rms_eps)


def logits(params: Params, hidden: Tensor) -> Tensor:
    """Next-token logits [J, N, V] of normed hidden states [J, N, D]."""
    return _project(hidden, params.head, None)


@torch.no_grad()
def extend(
    params: Params, config: ModelConfig, ids: Tensor, start: Tensor, cache: KVCache, rows: Tensor
) -> None:
    """Append T tokens per row to the cache.

    ids [J, b, T], start [J, b]: the position of each row's first new token, rows [J*b]: cache rows. Rows may
    be padded on the right: what lands behind a row's real tokens is overwritten before it is ever read, as
    long as start + T stays within the cache.
    """
    J, b, T = ids.shape
    width = int(start.max()) + T
    positions = start.reshape(-1, 1) + torch.arange(T, device=ids.device)  # [R, T]
    ropes = _layer_ropes(config, width, ids.device, params.embed.dtype, positions)
    from_empty = width == T
    visible = None if from_empty else _visible(positions, width, None)[:, None]
    x = _embed(params.embed, ids.reshape(J, b * T), config)
    for i, layer in enumerate(params.layers):
        cos, sin = ropes[i]  # [R, T, 1, d/2]
        q, k, v = _split_heads(_qkv(x, layer, config, None), layer, config, (J * b, T), cos, sin)
        keys, values = cache.keys[i], cache.values[i]
        keys[rows[:, None], :, positions] = k.transpose(1, 2).to(keys.dtype)
        values[rows[:, None], :, positions] = v.transpose(1, 2).to(values.dtype)
        if i == config.num_layers - 1:
            return
        if not from_empty:
            k = keys[rows, :, :width].to(q.dtype)
            v = values[rows, :, :width].to(q.dtype)
        window = config.layer_window(i)
        seen = visible
        if window is not None and window < width:
            seen = _visible(positions, width, window)[:, None]
        y = F.scaled_dot_product_attention(
            q,
            _repeat_kv(k, config),
            _repeat_kv(v, config),
            attn_mask=seen,
            is_causal=seen is None,
            scale=config.query_scale,
        )
        y = y.transpose(1, 2).reshape(J, b * T, config.q_size)
        x = x + _attention_out(y, layer, config, None)
        x = x + _feed_forward(x, layer, config, None)


@torch.no_grad()
def decode(
    params: Params,
    config: ModelConfig,
    token: Tensor,
    position: Tensor,
    cache: KVCache,
    width: int,
    rows: Tensor | None = None,
) -> Tensor:
    """Append one token per row and return next-token logits [J, B, V].

    token, position [J, B]; every position < width <= cache.max_len. `rows` [J*B] names the cache rows; without
    it they are the first J*B, which saves a copy. Reads and writes fixed buffers only, so that a CUDA graph can hold it.
    """
    J, B = token.shape
    R, K, d = J * B, config.num_kv_heads, config.head_dim
    groups, max_len = config.num_heads // K, cache.max_len
    place = position.reshape(R)
    row = torch.arange(R, device=token.device) if rows is None else rows
    head = row[:, None] * K + torch.arange(K, device=token.device)
    landing = (head * max_len + place[:, None]).reshape(R * K)  # flat cache positions to write
    ropes = _layer_ropes(config, max_len, token.device, params.embed.dtype, place[:, None])
    masks: dict[int | None, Tensor] = {}  # by window, [R, 1, width]
    for window in {config.layer_window(i) for i in range(config.num_layers)}:
        mask = torch.zeros(R, 1, width, device=token.device, dtype=params.embed.dtype)
        masks[window] = mask.masked_fill_(~_visible(place[:, None], width, window), -math.inf)
    x = _embed(params.embed, token, config)
    for i, layer in enumerate(params.layers):
        cos, sin = ropes[i]  # [R, 1, 1, d/2]
        mask = masks[config.layer_window(i)]
        q, k, v = _split_heads(_qkv(x, layer, config, None), layer, config, (R, 1), cos, sin)
        keys, values = cache.keys[i], cache.values[i]
        keys.view(-1, d).index_copy_(0, landing, k.reshape(R * K, d).to(keys.dtype))
        values.view(-1, d).index_copy_(0, landing, v.reshape(R * K, d).to(values.dtype))
        if rows is None:
            seen_keys = keys[:R].view(R * K, max_len, d)[:, :width]
            seen_values = values[:R].view(R * K, max_len, d)[:, :width]
        else:
            seen_keys = keys[rows, :, :width].view(R * K, width, d)
            seen_values = values[rows, :, :width].view(R * K, width, d)
        query = (q * config.query_scale).reshape(R * K, groups, d).to(keys.dtype)
        scores = torch.bmm(query, seen_keys.transpose(1, 2)).view(R, K * groups, width)
        scores = (scores.to(mask.dtype) + mask).float().softmax(-1).to(keys.dtype)
        y = torch.bmm(scores.view(R * K, groups, width), seen_values)
        x = x + _attention_out(y.reshape(J, B, config.q_size).to(x.dtype), layer, config, None)
        x = x + _feed_forward(x, layer, config, None)
    return logits(params, rms_norm(x, params.final_norm, config.rms_eps))


def rotary_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Float32 cos and sin [length, 1, d/2] of rotary positions, on the CPU."""
    return _rope(config.rope_theta, config, length, torch.device("cpu"), torch.float32)


def _embed(embed: Tensor, ids: Tensor, config: ModelConfig) -> Tensor:
    """Token vectors [J, N, D]; Gemma's are scaled, its output layer is not."""
    vectors = _token_vectors(embed, ids)
    return vectors if config.gemma is None else vectors * config.hidden_size**0.5


def _token_vectors(embed: Tensor, ids: Tensor) -> Tensor:
    jobs, vocab, width = embed.shape
    if jobs == 1:
        return F.embedding(ids, embed.view(vocab, width))
    job = torch.arange(jobs, device=ids.device)[:, None]
    if torch.is_grad_enabled():  # one table with offsets: its backward is deterministic
        return F.embedding(ids + job * vocab, embed.reshape(jobs * vocab, width))
    return embed[job, ids]


def _project(x: Tensor, linear: Linear, dropout: Dropout | None) -> Tensor:
    """X [J, N, D] times weights [J or 1, O, D], plus adapters."""
    weight, bias = linear.weight, linear.bias
    if weight.shape[0] == 1:
        y = F.linear(x, weight.squeeze(0), None if bias is None else bias.squeeze(0))
    elif bias is None:
        y = torch.bmm(x, weight.transpose(1, 2))
    else:
        y = torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))
    if not linear.adapters:
        return y
    if dropout is not None and dropout.probability > 0:
        kept = torch.rand(x.shape, generator=dropout.generator, device=x.device)
        x = x * (kept >= dropout.probability) / (1 - dropout.probability)
    return y + _adapter_delta(x, linear.adapters, y.shape[-1])


def _adapter_delta(x: Tensor, adapters: tuple[Adapter, ...], rows: int) -> Tensor:
    pieces, done = [], 0
    for adapter in adapters:  # in row order
        if adapter.start_row > done:
            pieces.append(x.new_zeros(*x.shape[:-1], adapter.start_row - done))
        low = torch.matmul(x, adapter.down.transpose(1, 2))
        pieces.append(torch.matmul(low, adapter.up.transpose(1, 2)) * adapter.scale)
        done = adapter.start_row + adapter.up.shape[1]
    if done < rows:
        pieces.append(x.new_zeros(*x.shape[:-1], rows - done))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def _qkv(x: Tensor, layer: LayerParams, config: ModelConfig, dropout: Dropout | None) -> Tensor:
    return _project(rms_norm(x, layer.attn_norm, config.rms_eps), layer.qkv, dropout)


def _feed_forward(
    x: Tensor, layer: LayerParams, config: ModelConfig, dropout: Dropout | None
) -> Tensor:
    gate_up = _project(rms_norm(x, layer.mlp_norm, config.rms_eps), layer.gate_up, dropout)
    gated = swiglu(gate_up) if config.gemma is None else geglu(gate_up)
    y = _project(gated, layer.down, dropout)
    return y if layer.mlp_post_norm is None else rms_norm(y, layer.mlp_post_norm, config.rms_eps)


def _attention_out(
    x: Tensor, layer: LayerParams, config: ModelConfig, dropout: Dropout | None
) -> Tensor:
    y = _project(x, layer.attn_out, dropout)
    return y if layer.attn_post_norm is None else rms_norm(y, layer.attn_post_norm, config.rms_eps)


def _split_heads(
    qkv: Tensor,
    layer: LayerParams,
    config: ModelConfig,
    shape: tuple[int, int],
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Q [R, H, T, d], k and v [R, K, T, d] of fused rows; q and k normed and rotated."""
    R, T = shape
    H, K, d = config.num_heads, config.num_kv_heads, config.head_dim
    fused = qkv.view(R, T, H + 2 * K, d)
    if layer.q_norm is None or layer.k_norm is None:
        return split_rotary(fused, cos, sin, H, K)
    q, k, v = torch.split(fused, [H, K, K], 2)
    jobs = qkv.shape[0]
    q = _head_norm(q, layer.q_norm, jobs, config.rms_eps)
    k = _head_norm(k, layer.k_norm, jobs, config.rms_eps)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v.transpose(1, 2)


def _head_norm(x: Tensor, weight: Tensor, jobs: int, eps: float) -> Tensor:
    by_job = x.reshape(jobs, -1, *x.shape[1:])
    return (F.rms_norm(by_job, (x.shape[-1],), eps=eps) * weight).view(x.shape)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x [R, T, h, d] -> [R, h, T, d]; cos, sin [(R,) T, 1, d/2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).transpose(1, 2)


def _repeat_kv(x: Tensor, config: ModelConfig) -> Tensor:
    groups = config.num_heads // config.num_kv_heads
    if groups == 1:
        return x
    rows, heads, length, width = x.shape
    return x[:, :, None].expand(rows, heads, groups, length, width).reshape(rows, -1, length, width)


@lru_cache(maxsize=64)
def _rope_table(
    theta: float, head_dim: int, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    # Built outside any inference mode: training reuses the same cached tensors.
    with torch.inference_mode(mode=False), torch.no_grad():
        inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angle = torch.outer(torch.arange(length, dtype=torch.float32), inverse).unsqueeze(1)
        return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def _rope(
    theta: float, config: ModelConfig, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cos and sin [length, 1, d/2]; tables are built in powers of two and cut."""
    size = 1 << max(8, (length - 1).bit_length())
    cos, sin = _rope_table(theta, config.head_dim, size, device, dtype)
    return cos[:length], sin[:length]


def _layer_ropes(
    config: ModelConfig,
    length: int,
    device: torch.device,
    dtype: torch.dtype,
    positions: Tensor | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Cos and sin of every layer, of all positions or of the given ones; layers of one base share them."""
    thetas = [config.layer_rope_theta(i) for i in range(config.num_layers)]
    tables = {}
    for theta in set(thetas):
        cos, sin = _rope(theta, config, length, device, dtype)
        tables[theta] = (cos, sin) if positions is None else (cos[positions], sin[positions])
    return [tables[theta] for theta in thetas]


def _visible(positions: Tensor, width: int, window: int | None) -> Tensor:
    """Which of the keys 0..width-1 a query at each of `positions` [..., T] sees: [..., T, width]."""
    distance = positions[..., None] - torch.arange(width, device=positions.device)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
