"""All tensors of a forward pass, by the place where they are used.

Axes: J job, V vocabulary, D hidden, d head, O outputs, o rows of an update, r rank. A first axis of 1 is shared by all jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.engine.config import ModelConfig

__all__ = ["Adapter", "LayerParams", "Linear", "Params", "bind", "rotary_neighbours"]


class Adapter(NamedTuple):
    """A low-rank update of some rows of a projection: `scale * up @ down`."""

    start_row: int
    down: Tensor  # [J, r, D]
    up: Tensor  # [J, o, r]
    scale: float


class Linear(NamedTuple):
    """One projection, shared (J = 1) or per job."""

    weight: Tensor  # [J or 1, O, D]
    bias: Tensor | None = None  # [J or 1, O]
    adapters: tuple[Adapter, ...] = ()


class LayerParams(NamedTuple):
    """One transformer block."""

    attn_norm: Tensor  # [J or 1, 1, D]
    qkv: Linear
    q_norm: Tensor | None  # [J or 1, 1, 1, 1, d]
    k_norm: Tensor | None
    attn_out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    attn_post_norm: Tensor | None = None
    """Over what attention adds to the residual (Gemma), as is the next over the feed-forward's."""
    mlp_post_norm: Tensor | None = None


class Params(NamedTuple):
    """All tensors of a forward pass, ready to use."""

    embed: Tensor  # [J or 1, V, D]
    layers: tuple[LayerParams, ...]
    final_norm: Tensor  # [J or 1, 1, D]
    head: Linear


def bind(
    config: ModelConfig,
    views: Mapping[str, Tensor],
    *,
    adapters: Mapping[str, tuple[Adapter, ...]] | None = None,
    dtype: torch.dtype | None = None,
) -> Params:
    """Arrange named views [J, *shape] for `engine.model`; `dtype` casts them (differentiably)."""
    cast = {name: view if dtype is None else view.to(dtype) for name, view in views.items()}
    extra = adapters or {}

    def linear(name: str) -> Linear:
        return Linear(cast[name], cast.get(name + "_bias"), _cast_all(extra.get(name, ()), dtype))

    def norm(name: str) -> Tensor:
        if config.gemma is None:
            return cast[name].unsqueeze(1)
        whole = views[name].unsqueeze(1) + 1  # before the cast: 1 + weight has few bits to spare
        return whole if dtype is None else whole.to(dtype)

    def post_norm(name: str) -> Tensor | None:
        return norm(name) if name in cast else None

    def head_norm(name: str) -> Tensor | None:
        return norm(name)[:, :, None, None] if name in cast else None

    layers = tuple(
        LayerParams(
            attn_norm=norm(f"layers.{i}.attn_norm"),
            qkv=linear(f"layers.{i}.qkv"),
            q_norm=head_norm(f"layers.{i}.q_norm"),
            k_norm=head_norm(f"layers.{i}.k_norm"),
            attn_out=linear(f"layers.{i}.attn_out"),
            mlp_norm=norm(f"layers.{i}.mlp_norm"),
            gate_up=linear(f"layers.{i}.gate_up"),
            down=linear(f"layers.{i}.down"),
            attn_post_norm=post_norm(f"layers.{i}.attn_post_norm"),
            mlp_post_norm=post_norm(f"layers.{i}.mlp_post_norm"),
        )
        for i in range(config.num_layers)
    )
    head = linear("embed" if config.tie_embeddings else "lm_head")
    return Params(cast["embed"], layers, norm("final_norm"), head._replace(bias=None))


def rotary_neighbours(qkv: Linear, config: ModelConfig) -> Linear:
    """The projection with those outputs made neighbours that rotary positions turn together, half a head apart."""
    H, K, d = config.num_heads, config.num_kv_heads, config.head_dim
    order = torch.arange((H + 2 * K) * d, device=qkv.weight.device)
    turned = order[: (H + K) * d].view(H + K, 2, d // 2).transpose(1, 2)
    order = torch.cat((turned.flatten(), order[(H + K) * d :]))

    def moved(adapter: Adapter) -> Adapter:  # of whole heads
        start, count = adapter.start_row, adapter.up.shape[1]
        return adapter._replace(up=adapter.up[:, order[start : start + count] - start])

    bias = None if qkv.bias is None else qkv.bias[:, order]
    return Linear(qkv.weight.index_select(1, order), bias, tuple(map(moved, qkv.adapters)))


def _cast_all(adapters: tuple[Adapter, ...], dtype: torch.dtype | None) -> tuple[Adapter, ...]:
    if dtype is None:
        return adapters
    return tuple(one._replace(down=one.down.to(dtype), up=one.up.to(dtype)) for one in adapters)
