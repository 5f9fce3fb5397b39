"""Tiny GGUF files, written the way llama.cpp writes them."""

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from nestling.engine.weights import Weights, parts

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT = "ann has 12 apples. bob adds 7 <apples> and says: naïve café, 日本! start the turn of ann."


def byte_level_tokens(size: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of a small byte-level BPE, specials first."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.train_from_iterator(
        [TEXT] * 3,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(SPECIALS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    vocab = library.get_vocab()
    model = json.loads(library.to_str())["model"]
    merges = [" ".join(merge) for merge in model["merges"]]
    return sorted(vocab, key=vocab.__getitem__), merges


def sentence_pieces() -> tuple[list[str], list[float], list[int]]:
    """Pieces, scores and types in the manner of Gemma: words by merges, bytes as the way out."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    own = ["\n", "\n\n", "  "]
    letters = sorted(set("▁" + TEXT.replace(" ", "▁")) - set("日本"))
    words = [
        "▁a",
        "nn",
        "ann",
        "▁ann",
        "st",
        "art",
        "ar",
        "▁st",
        "start",
        "▁start",
        "_of",
        "_turn",
        "tu",
        "rn",
        "turn",
    ]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [*specials, *own, *bytes_, *letters, "_", *words]
    types = (
        [CONTROL] * 6
        + [USER_DEFINED] * 3
        + [BYTE] * 256
        + [NORMAL] * (len(letters) + 1 + len(words))
    )
    scores = [-1000.0] * 9 + [0.0] * 256 + [-900.0] * (len(letters) + 1)
    return pieces, scores + [-float(rank) for rank in range(len(words))], types


def write_llama(path: Path, weights: Weights) -> None:
    """Llama with a byte-level tokenizer; projections in Q8_0, the rest in float32."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    config = weights.config
    writer = GGUFWriter(path, "llama")
    _add_shape(writer, config)
    tokens, merges = byte_level_tokens(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL] * 3 + [NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    for name, values in _tensors(weights, _LLAMA):
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            values = _interleaved(values, config.head_dim)
        if values.ndim == 2 and values.shape[-1] % 32 == 0:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    _close(writer)


def write_gemma(path: Path, weights: Weights) -> None:
    """Gemma 3 with a SentencePiece tokenizer, in float32."""
    from gguf import GGUFWriter

    config = weights.config
    assert config.gemma is not None
    writer = GGUFWriter(path, "gemma3")
    _add_shape(writer, config)
    writer.add_key_length(config.head_dim)
    writer.add_sliding_window(config.gemma.window)
    pieces, scores, types = sentence_pieces()
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_add_space_prefix(False)
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    for name, values in _tensors(weights, _GEMMA):
        writer.add_tensor(name, values + 1 if name.endswith("norm.weight") else values)
    _close(writer)


_SHARED = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LLAMA = _SHARED | {"post_attention_layernorm": "ffn_norm"}
_GEMMA = _SHARED | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _add_shape(writer, config):
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope_theta)


def _tensors(weights, names):
    views = weights.views()
    for part in parts(weights.config):
        rows = views[part.slot][0].narrow(0, part.start_row, part.shape[0])
        stem, _, end = part.hf_name.rpartition(".")
        if stem in _OUTER:
            name = _OUTER[stem]
        else:
            _, _, layer, inner = stem.split(".", 3)
            name = f"blk.{layer}.{names[inner]}"
        yield f"{name}.{end}", rows.to(torch.float32).numpy().copy()


def _interleaved(rows, head_dim):
    """The permutation of llama.cpp's converter: halves of a head become neighbours."""
    halves = rows.reshape(-1, 2, head_dim // 2, rows.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _close(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
