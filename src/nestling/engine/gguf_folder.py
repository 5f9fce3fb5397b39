"""A GGUF file as a model folder: dequantised to float32 once, its tokenizer written as `tokenizer.json`.

Needs the extra `open` (package `gguf`, from the llama.cpp project), which knows the block formats. What llama.cpp
changes when it writes a file is undone here: the rows of Llama's query and key projections are interleaved, and 1
is added to Gemma's norms (source: `conversion/llama.py` and `gemma.py` of llama.cpp, mid-2026).
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from nestling.core.errors import ConfigError, ModelError
from nestling.engine.config import Gemma3, ModelConfig
from nestling.engine.gguf_tokenizer import tokenizer_json
from nestling.engine.tokenizer import Tokenizer

__all__ = ["convert"]

_GEMMA_LOCAL_THETA: Final = 10_000.0
_GEMMA_GLOBAL_EVERY: Final = 6
"""Not in the file; both are those of every Gemma 3."""
_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3", "gemma3")
_LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)")
_OUTER: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_Array = npt.NDArray[np.float32]


class _Reader(Protocol):
    """The part of `gguf.GGUFReader` that is used."""

    tensors: Any

    def get_field(self, key: str) -> Any: ...  # noqa: ANN401


def convert(file: Path, folder: Path) -> ModelConfig:
    """Write `config.json`, `model.safetensors` and the tokenizer of `file` into `folder`.

    Raises:
        ConfigError: the extra `open` is not installed.
        ModelError: not a GGUF file, or a layout, block format or tokenizer that is not supported.
        OSError: such as a full disk.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    reader = _open(file)
    config = _config(reader)
    tokenizer = Tokenizer(tokenizer_json(lambda key: _value(reader, key)))
    tensors = dict(_tensors(reader, config))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # how it says what the system said
        if "No space left" in str(error):
            raise OSError(errno.ENOSPC, str(error)) from error
        raise
    ends = {"eos_token_id": tokenizer.turn_end_id, "pad_token_id": tokenizer.pad_id}
    _write(folder / "config.json", {**config.to_hf(), "dtype": "float32", **ends})
    _write(folder / "generation_config.json", {**ends, "do_sample": True, "temperature": 1.0})
    tokenizer.save(folder)
    return config


def _open(file: Path) -> _Reader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError(
            "reading a GGUF file needs the package gguf; install it with: "
            "pip install 'nestling[open]'"
        ) from error
    try:
        reader: _Reader = GGUFReader(file)
    except (ValueError, KeyError, IndexError) as error:  # what the reader raises on odd bytes
        raise ModelError(f"{file} is not a readable GGUF file: {error}; fetch it again") from error
    return reader


def _value(reader: _Reader, key: str) -> Any:  # noqa: ANN401 (whatever the file says)
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _config(reader: _Reader) -> ModelConfig:
    kind = _value(reader, "general.architecture")
    if kind not in _ARCHITECTURES:
        raise ModelError(
            f"GGUF architecture {kind!r} is not supported; expected {', '.join(_ARCHITECTURES)}"
        )

    def read(key: str, default: object = None) -> Any:  # noqa: ANN401
        found = _value(reader, f"{kind}.{key}")
        if found is None and default is None:
            raise ModelError(f"the GGUF file has no {kind}.{key}; expected a complete model")
        return default if found is None else found

    scaling = _value(reader, f"{kind}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise ModelError(f"rope scaling {scaling!r} is not supported; expected none")
    hidden, heads = read("embedding_length"), read("attention.head_count")
    layers = read("block_count")
    head_dim = read("attention.key_length", read("rope.dimension_count", hidden // heads))
    names = {tensor.name for tensor in reader.tensors}
    gemma = None
    if kind == "gemma3":
        every = range(_GEMMA_GLOBAL_EVERY - 1, layers, _GEMMA_GLOBAL_EVERY)
        gemma = Gemma3(
            query_scalar=head_dim,
            window=read("attention.sliding_window"),
            local_rope_theta=_GEMMA_LOCAL_THETA,
            global_layers=tuple(every),
        )
    return ModelConfig(
        vocab_size=len(_value(reader, "tokenizer.ggml.tokens") or ()),
        hidden_size=hidden,
        intermediate_size=read("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read("attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_theta=_short(read("rope.freq_base", 10_000.0)),
        rms_eps=_short(read("attention.layer_norm_rms_epsilon")),
        tie_embeddings="output.weight" not in names,
        attention_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "gemma3"),
        max_positions=read("context_length"),
        gemma=gemma,
    )


def _short(value: float) -> float:
    """A float32 as its shortest decimal: the file's 9.99999974e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _tensors(reader: _Reader, config: ModelConfig) -> Iterator[tuple[str, _Array]]:
    from gguf import GGMLQuantizationType, dequantize

    is_llama = _value(reader, "general.architecture") == "llama"
    for tensor in reader.tensors:
        name = _hf_name(tensor.name, config)
        try:
            values: _Array = np.ascontiguousarray(
                dequantize(tensor.data, tensor.tensor_type), np.float32
            )
        except NotImplementedError as error:
            kind = GGMLQuantizationType(tensor.tensor_type).name
            raise ModelError(
                f"{tensor.name} is stored as {kind}, which gguf cannot dequantise; take another file"
            ) from error
        if is_llama and tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            values = _uninterleaved(values, config.head_dim)
        if config.gemma is not None and tensor.name.endswith("norm.weight"):
            values = values - np.float32(1)
        yield name, values


def _hf_name(name: str, config: ModelConfig) -> str:
    if name in _OUTER:
        return _OUTER[name]
    match = _LAYER.fullmatch(name)
    if match:
        slot, _, end = match[2].rpartition(".")
        inner = _INNER.get(slot)
        if slot == "ffn_norm":
            inner = (
                "post_attention_layernorm" if config.gemma is None else "pre_feedforward_layernorm"
            )
        if inner is not None:
            return f"model.layers.{match[1]}.{inner}.{end}"
    raise ModelError(f"tensor {name} has no place in the layouts that are supported")


def _uninterleaved(rows: _Array, head_dim: int) -> _Array:
    """Rows of a projection in the order of halves, from llama.cpp's order of pairs."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
