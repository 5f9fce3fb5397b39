"""Shape of a decoder-only transformer of the Llama family, and its Hugging Face `config.json`.

Llama, Qwen2 (bias on the query, key and value projections) and Qwen3 (RMS norm on queries and keys) are one
layout with two switches. Anything that would change the numbers and is not one of them is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError, model_validator

from nestling.core.errors import ModelError
from nestling.core.frozen import Frozen

__all__ = ["ModelConfig"]

_MODEL_TYPES = ("llama", "qwen2", "qwen3")


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

    @model_validator(mode="after")
    def _check_heads(self) -> ModelConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary positions need an even one")
        return self

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

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
                head_dim=raw.get("head_dim") or (128 if model_type == "qwen3" else hidden // heads),
                rope_theta=_rope_theta(raw),
                rms_eps=raw.get("rms_norm_eps", 1e-6),
                tie_embeddings=raw.get("tie_word_embeddings", False),
                attention_bias=model_type == "qwen2",
                qk_norm=model_type == "qwen3",
                max_positions=raw.get("max_position_embeddings", 2048),
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
        architecture = {
            "llama": "LlamaForCausalLM",
            "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM",
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
        }


def _rope_theta(raw: Mapping[str, Any]) -> float:
    parameters = raw.get("rope_parameters") or {}
    return float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)


def _refuse_variants(raw: Mapping[str, Any]) -> None:
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    found = []
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        found.append(f"rope scaling {rope.get('rope_type', rope.get('type'))!r}")
    if float(raw.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0) != 1.0:
        found.append("partial rotary positions")
    if raw.get("hidden_act", "silu") != "silu":
        found.append(f"activation {raw['hidden_act']!r}")
    if raw.get("attention_bias") and raw.get("model_type") != "qwen2":
        found.append("bias on the attention output projection")
    if raw.get("mlp_bias"):
        found.append("bias in the feed-forward layers")
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
        found.append("sliding-window attention")
    if raw.get("quantization_config"):
        found.append("quantised weights")
    if found:
        raise ModelError(
            f"config.json asks for {', '.join(found)}, which is not supported; "
            "expected plain Llama, Qwen2 or Qwen3"
        )
