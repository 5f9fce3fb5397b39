"""The closed vocabulary of the tiny models, below 640 tokens with the 256 bytes.

Every entity, label and function word of the families is one token wherever it stands; function
words carry the blanks around them. No string consists of the letters a..h alone, so that the random
strings of string_pipeline always split into letters. Digits and single letters are byte tokens.
"""

from __future__ import annotations

from functools import cache

from nestling.engine.tokenizer import Tokenizer
from nestling.families.public.steps import BAD_CALL, LABELS, LAST_LABEL, NAMES
from nestling.families.registry import ALL, get

__all__ = ["strings", "tokenizer"]


def strings() -> tuple[str, ...]:
    """All strings that are one token, in a fixed order."""
    shared = (*LABELS, LAST_LABEL, *NAMES, ". ", "ok", BAD_CALL, "ANSWER: ", "the result is ")
    own = (piece for name in ALL for piece in get(name).vocabulary)
    return tuple(dict.fromkeys((*shared, *own)))


@cache
def tokenizer() -> Tokenizer:
    """The tokenizer of every base model that we build."""
    return Tokenizer.closed(strings())
