"""The tokenizer inside a GGUF file as the text of a `tokenizer.json`.

Two kinds exist in the files we read: byte-level BPE with its merges (`gpt2`), and SentencePiece BPE with scores
and byte fallback (`llama`), whose merges follow from the scores: of all neighbours, the pair goes first whose
joined piece has the highest score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from nestling.core.errors import ModelError

__all__ = ["tokenizer_json"]

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE: Final = "\u2581"
_QWEN_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2 and Qwen3 cut text. Source: `tokenizer.json` of Qwen/Qwen3-0.6B."""

_Read = Callable[[str], Any]


def tokenizer_json(read: _Read) -> str:
    """The text, from a function that gives the value of a metadata key or None.

    Raises:
        ModelError: a kind of tokenizer that is not supported.
    """
    kind = read("tokenizer.ggml.model")
    pieces: list[str] = list(read("tokenizer.ggml.tokens") or ())
    types: list[int] = list(read("tokenizer.ggml.token_type") or ())
    if not pieces or len(types) != len(pieces):
        raise ModelError("the GGUF file holds no whole tokenizer; expected tokens and their types")
    if kind == "gpt2":
        built = _byte_level(pieces, read("tokenizer.ggml.merges"), read("tokenizer.ggml.pre"))
    elif kind == "llama" and not read("tokenizer.ggml.add_space_prefix"):
        built = _sentence_piece(pieces, types, list(read("tokenizer.ggml.scores") or ()))
    else:
        raise ModelError(
            f"tokenizer {kind!r} is not supported; expected gpt2, or llama without a space prefix"
        )
    built.add_special_tokens(
        [
            _added(piece, special=True)
            for piece, of in zip(pieces, types, strict=True)
            if of == _CONTROL
        ]
    )
    built.add_tokens(
        [
            _added(piece, special=False)
            for piece, of in zip(pieces, types, strict=True)
            if of == _USER_DEFINED
        ]
    )
    text: str = built.to_str()
    return text


def _added(piece: str, *, special: bool) -> AddedToken:
    return AddedToken(piece, special=special, normalized=False)


def _byte_level(pieces: Sequence[str], merges: Sequence[str] | None, pre: str | None) -> Any:  # noqa: ANN401
    if not merges:
        raise ModelError("the GGUF file holds no merges; expected those of its tokenizer")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    built = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    cuts = {
        "smollm": [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ],
        "qwen2": [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    }
    if pre not in cuts:
        raise ModelError(f"pre-tokenizer {pre!r} is not supported; expected {', '.join(cuts)}")
    built.pre_tokenizer = pre_tokenizers.Sequence(cuts[pre])
    if pre == "qwen2":
        built.normalizer = normalizers.NFC()
    built.decoder = decoders.ByteLevel()
    return built


def _sentence_piece(pieces: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> Any:  # noqa: ANN401
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = _merges(vocab, pieces, types, scores)
    model = models.BPE(
        vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token=_unknown(pieces)
    )
    built = tokenizers.Tokenizer(model)
    built.normalizer = normalizers.Replace(" ", _SPACE)
    built.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return built


def _unknown(pieces: Sequence[str]) -> str | None:
    return "<unk>" if "<unk>" in pieces else None


def _merges(
    vocab: dict[str, int], pieces: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Pairs whose join is an ordinary piece, best score first.

    Control tokens get no pair: content that spells one must stay content.
    """
    ranked: list[tuple[float, int, int, int]] = []
    for index, (piece, of) in enumerate(zip(pieces, types, strict=True)):
        if of != _NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], index, left, right))
    ranked.sort()
    return [(pieces[left], pieces[right]) for _, _, left, right in ranked]
