"""The embedded agent's tokenizer: byte-level BPE over its own episodes, skeletons as tokens.

Digits stand alone, words keep their leading blank, a newline takes its indent with it (escaped,
as inside a tool call, or not). The pieces that every call repeats are added tokens: they cost one
token each and the text stays plain Hermes dialect.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from nestling.engine.tokenizer import GLUE, PAD, TURN_END, TURN_START, Tokenizer

__all__ = ["SKELETONS", "train_tokenizer"]

SKELETONS: Final[tuple[str, ...]] = (
    '<tool_call>\n{"name": "',
    '", "arguments": {"',
    '", "arguments": {}}\n</tool_call>',
    '"}}\n</tool_call>',
    '", "content": "',
    '", "old": "',
    '", "new": "',
    'path": "environment/taskset.py',
    'path": "job.toml',
)
"""Fragments of tool calls that are one token each."""

_PIECES: Final = (
    r"\\n *|\\\"|\n *|[0-9]| ?[A-Z]?[a-z]+|_[A-Za-z]+| ?[A-Z]+| ?[^\sA-Za-z0-9\\_]+|\s+|."
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> Tokenizer:
    """BPE of at most `vocab_size` tokens, bytes, skeletons and specials included.

    Merges stop early when the corpus runs out of pairs seen at least 20 times.
    """
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    specials = [
        AddedToken(token, special=True, normalized=False)
        for token in (PAD, TURN_START, TURN_END, *GLUE)
    ]
    skeletons = [AddedToken(token, special=False, normalized=False) for token in SKELETONS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(skeletons),
        min_frequency=20,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=specials,
    )
    built.train_from_iterator(_without_skeletons(texts), trainer)
    built.add_tokens(skeletons)
    return Tokenizer(built.to_str(), pad_token=PAD)


def _without_skeletons(texts: Iterable[str]) -> Iterable[str]:
    """The stretches between skeletons, so that no merge is learnt across or inside one."""
    for text in texts:
        for skeleton in SKELETONS:
            text = text.replace(skeleton, "\x00")
        yield from (part for part in text.split("\x00") if part)
