"""Shape of a decoder-only transformer of the Llama family, and its Hugging Face `config.json`.

Llama, Qwen2 (bias on the query, key and value projections) and Qwen3 (RMS norm on queries and keys) are one
layout with two switches. Gemma 3 changes more, and all of it at once: see `Gemma3`. Anything that would change
the numbers and is none of these is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, ValidationError, model_validator

from nestling.core.errors import ModelError
from nestling.core.frozen import Frozen

__all__ = ["Gemma3", "ModelConfig"]

_GEMMA = "gemma3_text"
_MODEL_TYPES = ("llama", "qwen2", "qwen3", _GEMMA)
_GEMMA_ACTIVATION = "gelu_pytorch_tanh"


class Gemma3(Frozen):
    """What a Gemma 3 decoder does that a Llama does not.

    RMS norms multiply by 1 + weight and stand before and after attention and feed-forward; queries and keys are
    normed; the feed-forward gate is a tanh GELU; token vectors are scaled by the root of the hidden size; most
    layers see a window only. Source: arXiv:2503.19786, section 2; `modeling_gemma3.py` of transformers 5.24.
    """

    query_scalar: float = Field(gt=0)
    """Attention scores are divided by its root (`query_pre_attn_scalar`)."""
    window: int = Field(ge=1)
    """Keys that a local layer sees: the token itself and those just before it."""
    local_rope_theta: float = Field(gt=0)
    """Base of the rotary positions in local layers; global ones use `rope_theta`."""
    global_layers: tuple[int, ...]
    """Indices of the layers that see everything."""


class ModelConfig(Frozen):
    """Everything that fixes a model's shape and arithmetic."""

    vocab_size: int = Field(ge=2)
    hidden_size: int = Field(ge=2)
    intermediate_size: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    """Key and value heads; each serves `num_heads / num_kv_heads` query heads."""
    head_dim: int = Field(ge=2)
    rope_theta: float = Field(default=10000.0, gt=0)
    rms_eps: float = Field(default=1e-6, gt=0)
    tie_embeddings: bool = True
    """The output layer is the token embedding."""
    attention_bias: bool = False
    """Bias on the query, key and value projections (Qwen2)."""
    qk_norm: bool = False
    """RMS norm over each query and key head before rotation (Qwen3)."""
    max_positions: int = Field(default=2048, ge=1)
    gemma: Gemma3 | None = None
    """None: the plain layout."""

    @model_validator(mode="after")
    def _check_heads(self) -> ModelConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary positions need an even one")
        if self.gemma is not None and (self.attention_bias or not self.qk_norm):
            raise ValueError("Gemma 3 norms queries and keys and has no bias: qk_norm without bias")
        return self

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def query_scale(self) -> float:
        """Factor of the attention scores."""
        return float((self.head_dim if self.gemma is None else self.gemma.query_scalar) ** -0.5)

    def layer_window(self, layer: int) -> int | None:
        """How many keys a layer sees; None: all of them."""
        if self.gemma is None or layer in self.gemma.global_layers:
            return None
        return self.gemma.window

    def layer_rope_theta(self, layer: int) -> float:
        """Base of a layer's rotary positions."""
        if self.gemma is None or layer in self.gemma.global_layers:
            return self.rope_theta
        return self.gemma.local_rope_theta

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a `config.json` of transformers 4 or 5; ModelError names what is missing or unsupported."""
        model_type = raw.get("model_type")
        if model_type not in _MODEL_TYPES:
            raise ModelError(
                f"model_type {model_type!r} is not supported; expected one of {', '.join(_MODEL_TYPES)}"
            )
        _refuse_variants(raw)
        try:
            hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
            return cls(
                vocab_size=raw["vocab_size"],
                hidden_size=hidden,
                intermediate_size=raw["intermediate_size"],
                num_layers=raw["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=raw.get("num_key_value_heads") or heads,
                head_dim=raw.get("head_dim") or _HEAD_DIM.get(model_type, hidden // heads),
                rope_theta=_rope_theta(raw),
                rms_eps=raw.get("rms_norm_eps", 1e-6),
                tie_embeddings=raw.get("tie_word_embeddings", model_type == _GEMMA),
                attention_bias=model_type == "qwen2",
                qk_norm=model_type in ("qwen3", _GEMMA),
                max_positions=raw.get("max_position_embeddings", 2048),
                gemma=_gemma(raw) if model_type == _GEMMA else None,
            )
        except KeyError as error:
            raise ModelError(
                f"config.json has no {error}; expected a complete {model_type} config"
            ) from error
        except (ValidationError, TypeError, ZeroDivisionError) as error:
            raise ModelError(f"config.json is not valid: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that transformers reads back as the same model."""
        if self.qk_norm and self.attention_bias:
            raise ModelError(
                "attention_bias together with qk_norm has no Hugging Face layout here; turn one off"
            )
        model_type = "qwen3" if self.qk_norm else "qwen2" if self.attention_bias else "llama"
        if self.gemma is not None:
            model_type = _GEMMA
        architecture = {
            "llama": "LlamaForCausalLM",
            "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM",
            _GEMMA: "Gemma3ForCausalLM",
        }[model_type]
        return {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_embeddings,
            **({} if model_type == "qwen2" else {"attention_bias": False}),
            **({} if self.gemma is None else self._gemma_to_hf(self.gemma)),
        }

    def _gemma_to_hf(self, gemma: Gemma3) -> dict[str, Any]:
        thetas = {_GLOBAL: self.rope_theta, _LOCAL: gemma.local_rope_theta}
        return {
            "hidden_act": _GEMMA_ACTIVATION,
            "hidden_activation": _GEMMA_ACTIVATION,
            "query_pre_attn_scalar": _whole(gemma.query_scalar),
            "sliding_window": gemma.window,
            "layer_types": [
                _GLOBAL if layer in gemma.global_layers else _LOCAL
                for layer in range(self.num_layers)
            ],
            # the first two for transformers 4, the last for transformers 5
            "rope_theta": self.rope_theta,
            "rope_local_base_freq": gemma.local_rope_theta,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta}
                for kind, theta in thetas.items()
            },
        }


_HEAD_DIM = {"qwen3": 128, _GEMMA: 256}
"""What a config means that does not say it."""
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def _whole(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _gemma(raw: Mapping[str, Any]) -> Gemma3:
    layers = raw["num_hidden_layers"]
    kinds = raw.get("layer_types")
    if kinds is None:
        every = raw.get("sliding_window_pattern") or 6
        kinds = [_LOCAL if (layer + 1) % every else _GLOBAL for layer in range(layers)]
    if len(kinds) != layers or set(kinds) - {_GLOBAL, _LOCAL}:
        raise ModelError(
            f"layer_types has {len(kinds)} entries for {layers} layers, or kinds other than "
            f"{_GLOBAL} and {_LOCAL}; expected one of the two per layer"
        )
    local = (raw.get("rope_parameters") or {}).get(_LOCAL) or {}
    return Gemma3(
        query_scalar=raw.get("query_pre_attn_scalar") or 256,
        window=raw.get("sliding_window") or 4096,
        local_rope_theta=local.get("rope_theta") or raw.get("rope_local_base_freq") or 10000.0,
        global_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == _GLOBAL),
    )


def _rope_theta(raw: Mapping[str, Any]) -> float:
    parameters = raw.get("rope_parameters") or {}
    parameters = parameters.get(_GLOBAL) or parameters
    default = 1e6 if raw.get("model_type") == _GEMMA else 1e4
    return float(parameters.get("rope_theta") or raw.get("rope_theta") or default)


def _refuse_variants(raw: Mapping[str, Any]) -> None:
    is_gemma = raw.get("model_type") == _GEMMA
    found = [*_rope_variants(raw)]
    expected = _GEMMA_ACTIVATION if is_gemma else "silu"
    activation = raw.get("hidden_activation" if is_gemma else "hidden_act")
    if activation not in (None, expected):
        found.append(f"activation {activation!r}")
    if raw.get("attention_bias") and raw.get("model_type") != "qwen2":
        found.append("bias on the attention output projection")
    if raw.get("mlp_bias"):
        found.append("bias in the feed-forward layers")
    is_local = raw.get("use_sliding_window") or _LOCAL in (raw.get("layer_types") or ())
    if is_local and not is_gemma:
        found.append("sliding-window attention")
    if is_gemma and raw.get("use_bidirectional_attention"):
        found.append("attention to what comes later")
    if raw.get("final_logit_softcapping") or raw.get("attn_logit_softcapping"):
        found.append("soft-capped logits")
    if raw.get("quantization_config"):
        found.append("quantised weights")
    if found:
        raise ModelError(
            f"config.json asks for {', '.join(found)}, which is not supported; "
            "expected plain Llama, Qwen2, Qwen3 or Gemma 3"
        )


def _rope_variants(raw: Mapping[str, Any]) -> Iterator[str]:
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    by_kind = [rope[kind] for kind in (_GLOBAL, _LOCAL) if rope.get(kind)]
    for table in by_kind or [rope]:
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default":
            yield f"rope scaling {kind!r}"
        if (
            float(raw.get("partial_rotary_factor") or table.get("partial_rotary_factor") or 1.0)
            != 1
        ):
            yield "partial rotary positions"
