"""All weights of J models as one flat tensor [J, P] with named views.

Axes: J job, P parameter of one model, O output, D input (hidden), V vocabulary. One flat tensor makes an
optimiser step, a gradient norm per job, a snapshot and a hash each a single operation, and lets J jobs be
trained as one batch. Projections that read the same input are fused: `qkv` rows are queries, keys, values;
`gate_up` rows are gate, up. Hugging Face keeps them apart; `parts` maps one to the other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from nestling.core.errors import ConfigError
from nestling.engine.config import ModelConfig

__all__ = ["Part", "Slot", "Weights", "layout", "num_parameters", "parts", "split_views"]


_SUM_PIECE = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One named tensor inside the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    init_std: float | None
    """Standard deviation at initialisation; None: norms that change nothing, zeros for biases."""

    @property
    def size(self) -> int:
        """Number of scalars."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One Hugging Face tensor and the rows of our tensor that hold it."""

    hf_name: str
    slot: str
    start_row: int
    shape: tuple[int, ...]


@lru_cache(maxsize=64)
def layout(config: ModelConfig) -> tuple[Slot, ...]:
    """Every tensor of one model, in flat order."""
    hidden, ff = config.hidden_size, config.intermediate_size
    qkv = config.q_size + 2 * config.kv_size
    residual_std = 1 / math.sqrt(2 * config.num_layers)
    rows: list[tuple[str, tuple[int, ...], float | None]] = [
        ("embed", (config.vocab_size, hidden), 0.02)
    ]
    for i in range(config.num_layers):
        name = f"layers.{i}."
        rows += [
            (name + "attn_norm", (hidden,), None),
            (name + "qkv", (qkv, hidden), hidden**-0.5),
        ]
        if config.attention_bias:
            rows.append((name + "qkv_bias", (qkv,), None))
        if config.qk_norm:
            rows += [
                (name + "q_norm", (config.head_dim,), None),
                (name + "k_norm", (config.head_dim,), None),
            ]
        rows.append(
            (name + "attn_out", (hidden, config.q_size), config.q_size**-0.5 * residual_std)
        )
        if config.gemma is not None:
            rows.append((name + "attn_post_norm", (hidden,), None))
        rows += [
            (name + "mlp_norm", (hidden,), None),
            (name + "gate_up", (2 * ff, hidden), hidden**-0.5),
            (name + "down", (hidden, ff), ff**-0.5 * residual_std),
        ]
        if config.gemma is not None:
            rows.append((name + "mlp_post_norm", (hidden,), None))
    rows.append(("final_norm", (hidden,), None))
    if not config.tie_embeddings:
        rows.append(("lm_head", (config.vocab_size, hidden), 0.02))
    slots, offset = [], 0
    for slot_name, shape, std in rows:
        slots.append(Slot(name=slot_name, shape=shape, offset=offset, init_std=std))
        offset += math.prod(shape)
    return tuple(slots)


@lru_cache(maxsize=64)
def parts(config: ModelConfig) -> tuple[Part, ...]:
    """Every Hugging Face tensor name of this layout, with its place in ours."""
    hidden, ff = config.hidden_size, config.intermediate_size
    q, kv = config.q_size, config.kv_size
    found = [("model.embed_tokens.weight", "embed", 0, (config.vocab_size, hidden))]
    table: list[tuple[str, str, int, tuple[int, ...]]] = [
        ("input_layernorm.weight", "attn_norm", 0, (hidden,)),
        ("self_attn.q_proj.weight", "qkv", 0, (q, hidden)),
        ("self_attn.k_proj.weight", "qkv", q, (kv, hidden)),
        ("self_attn.v_proj.weight", "qkv", q + kv, (kv, hidden)),
        ("self_attn.o_proj.weight", "attn_out", 0, (hidden, q)),
        *((name, slot, 0, (hidden,)) for name, slot in _block_norms(config)),
        ("mlp.gate_proj.weight", "gate_up", 0, (ff, hidden)),
        ("mlp.up_proj.weight", "gate_up", ff, (ff, hidden)),
        ("mlp.down_proj.weight", "down", 0, (hidden, ff)),
    ]
    if config.attention_bias:
        table += [
            ("self_attn.q_proj.bias", "qkv_bias", 0, (q,)),
            ("self_attn.k_proj.bias", "qkv_bias", q, (kv,)),
            ("self_attn.v_proj.bias", "qkv_bias", q + kv, (kv,)),
        ]
    if config.qk_norm:
        table += [
            ("self_attn.q_norm.weight", "q_norm", 0, (config.head_dim,)),
            ("self_attn.k_norm.weight", "k_norm", 0, (config.head_dim,)),
        ]
    every: list[tuple[str, str, int, tuple[int, ...]]] = list(found)
    for i in range(config.num_layers):
        every += [
            (f"model.layers.{i}.{hf}", f"layers.{i}.{slot}", row, shape)
            for hf, slot, row, shape in table
        ]
    every.append(("model.norm.weight", "final_norm", 0, (hidden,)))
    if not config.tie_embeddings:
        every.append(("lm_head.weight", "lm_head", 0, (config.vocab_size, hidden)))
    return tuple(
        Part(hf_name=hf, slot=slot, start_row=row, shape=shape) for hf, slot, row, shape in every
    )


def _block_norms(config: ModelConfig) -> tuple[tuple[str, str], ...]:
    """The same name means the norm before the feed-forward in Llama, the one after attention in Gemma."""
    if config.gemma is None:
        return (("post_attention_layernorm.weight", "mlp_norm"),)
    return (
        ("post_attention_layernorm.weight", "attn_post_norm"),
        ("pre_feedforward_layernorm.weight", "mlp_norm"),
        ("post_feedforward_layernorm.weight", "mlp_post_norm"),
    )


def num_parameters(config: ModelConfig) -> int:
    """P: scalars of one model; a tied embedding counts once."""
    last = layout(config)[-1]
    return last.offset + last.size


def split_views(config: ModelConfig, flat: Tensor) -> dict[str, Tensor]:
    """Views [J, *shape] into `flat` [J, P] by name; they share its memory."""
    return {
        slot.name: flat[:, slot.offset : slot.offset + slot.size].view(flat.shape[0], *slot.shape)
        for slot in layout(config)
    }


class Weights:
    """The master weights of J models of one shape: `flat` [J, P] and views of it."""

    def __init__(self, config: ModelConfig, flat: Tensor) -> None:
        if flat.dim() != 2 or flat.shape[1] != num_parameters(config):
            raise ConfigError(
                f"flat weights have shape {tuple(flat.shape)}; "
                f"expected [jobs, {num_parameters(config)}] for this config"
            )
        self.config = config
        self.flat = flat

    @property
    def num_jobs(self) -> int:
        """J."""
        return self.flat.shape[0]

    def views(self) -> dict[str, Tensor]:
        """Named views [J, *shape]; writing to one writes to `flat`."""
        return split_views(self.config, self.flat)

    @classmethod
    def init(
        cls, config: ModelConfig, num_jobs: int = 1, generator: torch.Generator | None = None
    ) -> Weights:
        """Fresh float32 weights on the CPU; jobs differ from one another."""
        flat = torch.zeros(num_jobs, num_parameters(config))
        source = generator or torch.Generator().manual_seed(0)
        weights = cls(config, flat)
        for slot, view in zip(layout(config), weights.views().values(), strict=True):
            if slot.init_std is not None:
                view.normal_(0.0, slot.init_std, generator=source)
            elif slot.name.endswith("norm") and config.gemma is None:  # Gemma's are offsets from 1
                view.fill_(1.0)
        return weights

    @classmethod
    def seeded(cls, config: ModelConfig, seed: int, num_jobs: int = 1) -> Weights:
        """`init` with a generator of its own, for callers that know no torch."""
        return cls.init(config, num_jobs, torch.Generator().manual_seed(seed))

    def clone(self) -> Weights:
        """A copy that shares nothing."""
        return Weights(self.config, self.flat.detach().clone())

    def to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> Weights:
        """The same weights on a device; shares memory when nothing has to change."""
        return Weights(self.config, self.flat.to(device=device, dtype=dtype or self.flat.dtype))

    @classmethod
    def stack(cls, many: Sequence[Weights]) -> Weights:
        """Several models of one shape as one stack; jobs keep their order."""
        if not many:
            raise ConfigError("nothing to stack; expected at least one set of weights")
        if any(one.config != many[0].config for one in many):
            raise ConfigError("only models of one shape can be stacked; the configs differ")
        return cls(many[0].config, torch.cat([one.flat.detach() for one in many]))

    def job(self, index: int) -> Weights:
        """The weights of one job as J=1; shares memory with the stack."""
        if not 0 <= index < self.num_jobs:
            raise ConfigError(f"job {index} does not exist; this stack holds {self.num_jobs}")
        return Weights(self.config, self.flat[index : index + 1])

    def distance(self, other: Weights) -> float:
        """Euclidean norm of the difference, summed in float64 piece by piece; one device, any J."""
        total = 0.0
        pairs = zip(
            self.flat.detach().flatten().split(_SUM_PIECE),  # type: ignore[no-untyped-call]
            other.flat.detach().flatten().split(_SUM_PIECE),  # type: ignore[no-untyped-call]
            strict=True,
        )
        for ours, theirs in pairs:
            total += float((ours.double() - theirs.double()).square().sum())
        return math.sqrt(total)

    def content_hash(self, job: int = 0) -> str:
        """SHA-256 of one job's config and float32 little-endian values."""
        digest = hashlib.sha256(self.config.model_dump_json(exclude_none=True).encode())
        values = self.flat[job].detach().to(device="cpu", dtype=torch.float32).contiguous()
        digest.update(values.numpy().astype("<f4", copy=False).tobytes())
        return digest.hexdigest()
