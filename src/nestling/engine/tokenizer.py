"""Text to token ids and back, with a wall between trusted markup and untrusted content.

Wraps a `tokenizer.json` of the `tokenizers` library. `encode` never yields a special token, whatever
the text says; only `encode_markup`, which is for our own glue, does. Tokenizers of our tiny models
are closed: every listed string is one token, everything else falls back to 256 byte tokens, so that
any text round-trips exactly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from nestling.core.errors import ModelError
from nestling.engine.chat_layout import CHATML, LAYOUTS, ChatLayout

__all__ = ["CHAT_TEMPLATE", "GLUE", "PAD", "TURN_END", "TURN_START", "Tokenizer"]

TURN_START: Final = CHATML.turn_start
TURN_END: Final = CHATML.turn_end
PAD: Final = CHATML.pad

GLUE: Final[tuple[str, ...]] = (
    f"{TURN_START}system\n",
    f"{TURN_START}user\n",
    f"{TURN_END}\n{TURN_START}user\n",
    f"{TURN_END}\n{TURN_START}assistant\n",
    f"\n{TURN_START}user\n",
    f"\n{TURN_START}user\n<tool_response>\n",
    f"\n</tool_response>{TURN_END}\n{TURN_START}assistant\n",
)
"""Markup between two pieces of content; one special token each in a closed tokenizer."""

CHAT_TEMPLATE: Final = CHATML.template

_MAX_CACHED_CHARS: Final = 256


class Tokenizer:
    """Ids of one vocabulary; stateless apart from a cache, safe to share between threads."""

    layout: ChatLayout
    """How conversations are marked up in this vocabulary."""
    turn_end_id: int
    """Id of the token that ends a sampled turn, such as `<|im_end|>`."""
    pad_id: int
    """Id that fills unused places; never sampled on purpose."""
    vocab_size: int
    """Highest id plus one."""

    def __init__(self, tokenizer_json: str, *, pad_token: str | None = None) -> None:
        """From the text of a `tokenizer.json`.

        Raises:
            ModelError: the text is not a tokenizer, or it has no known turn markers.
        """
        self._content = _parse(tokenizer_json)
        self._content.encode_special_tokens = True
        self._markup = _parse(tokenizer_json)
        self._markup.encode_special_tokens = False
        self.layout = self._find_layout()
        self.turn_end_id = self._known_id(self.layout.turn_end)
        pads = (pad_token, self.layout.pad, self.layout.turn_end)
        self.pad_id = self._known_id(
            next(token for token in pads if token and self._id(token) is not None)
        )
        vocab: dict[str, int] = self._markup.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.special_ids: frozenset[int] = frozenset(
            token_id
            for token_id, token in self._markup.get_added_tokens_decoder().items()
            if token.special
        )
        """Ids that `encode` never yields."""
        glue = [self._id(piece) for piece in GLUE]
        self.is_closed = all(piece in self.special_ids for piece in glue)
        """Whether this is a vocabulary of ours, in which whole pieces of markup are tokens."""
        self._cached = lru_cache(maxsize=65536)(self._encode_content)
        self._cached_markup = lru_cache(maxsize=256)(self._encode_markup)

    @classmethod
    def closed(cls, strings: Iterable[str], *, glue: Sequence[str] = GLUE) -> Tokenizer:
        """A tokenizer in which each of `strings` is one token and all else is bytes.

        Where strings overlap, the longest of those that start first wins. Ids: 256 bytes, then
        `strings` in their order, then the specials (pad, `<|im_start|>`, `<|im_end|>`, glue), which
        are kept out of the BPE vocabulary: there, content that spells one would find its id.

        Raises:
            ModelError: a string contains `<|`, which only markup may.
        """
        words = [word for word in dict.fromkeys(strings) if len(word.encode()) > 1]
        if any("<|" in word for word in words):
            raise ModelError("a vocabulary string contains '<|'; expected content only; remove it")
        to_bytes = _byte_alphabet()
        specials = [PAD, TURN_START, TURN_END, *glue]
        byte_forms = ("".join(to_bytes[byte] for byte in word.encode()) for word in words)
        vocab = {piece: index for index, piece in enumerate((*to_bytes, *byte_forms))}
        built = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        if words:
            longest_first = sorted(words, key=len, reverse=True)
            pattern = Regex("|".join(_escape(word) for word in longest_first))
            split = pre_tokenizers.Split(pattern, behavior="isolated")
            built.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        else:
            built.pre_tokenizer = byte_level
        built.decoder = decoders.ByteLevel()
        built.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in specials]
        )
        return cls(built.to_str(), pad_token=PAD)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """From a model folder with `tokenizer.json` and, if there, `tokenizer_config.json`.

        Raises:
            ModelError: a file is missing, unreadable or not a tokenizer with the chat markers.
        """
        path = Path(folder) / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ModelError(
                f"cannot read {path}: {e}; expected a Hugging Face tokenizer file; "
                "point to a complete model folder"
            ) from e
        return cls(text, pad_token=_pad_token(Path(folder) / "tokenizer_config.json"))

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`; transformers can load the folder."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        (target / "tokenizer.json").write_text(self._markup.to_str(pretty=True), encoding="utf-8")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.layout.turn_end,
            **({"bos_token": self.layout.opening} if self.layout.opening else {}),
            "pad_token": self._markup.id_to_token(self.pad_id),
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            "chat_template": self.layout.template,
        }
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (target / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """Ids of untrusted content; markers written in it stay plain text."""
        if len(text) > _MAX_CACHED_CHARS:
            return list(self._encode_content(text))
        return list(self._cached(text))

    def encode_markup(self, text: str) -> list[int]:
        """Ids of trusted glue; markers in it become special tokens. Never pass content here."""
        return list(self._cached_markup(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The exact text of ids, special tokens included.

        Bytes that are not UTF-8 (a model may sample such) become U+FFFD; unknown ids vanish.
        """
        text: str = self._markup.decode(list(ids), skip_special_tokens=False)
        return text

    def _encode_content(self, text: str) -> tuple[int, ...]:
        return tuple(self._content.encode(_utf8_safe(text), add_special_tokens=False).ids)

    def _encode_markup(self, text: str) -> tuple[int, ...]:
        return tuple(self._markup.encode(_utf8_safe(text), add_special_tokens=False).ids)

    def _id(self, token: str) -> int | None:
        token_id: int | None = self._markup.token_to_id(token)
        return token_id

    def _known_id(self, token: str) -> int:
        token_id = self._id(token)
        assert token_id is not None
        return token_id

    def _find_layout(self) -> ChatLayout:
        for layout in LAYOUTS:
            markers = (layout.turn_start, layout.turn_end, layout.opening, layout.marker)
            if all(self._id(token) is not None for token in markers if token):
                return layout
        known = " or ".join({f"{one.turn_start} and {one.turn_end}": None for one in LAYOUTS})
        raise ModelError(
            f"the tokenizer has no token {TURN_START!r} or {TURN_END!r}; expected a chat tokenizer "
            f"with {known} (Qwen, SmolLM2, Gemma or one of ours); choose such a model"
        )


def _parse(tokenizer_json: str) -> tokenizers.Tokenizer:
    try:
        parsed = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as e:  # the library raises bare Exception for every kind of bad file
        raise ModelError(
            f"tokenizer.json cannot be parsed: {e}; expected the format of the tokenizers library; "
            "take the file from a Hugging Face model folder"
        ) from e
    parsed.no_padding()
    parsed.no_truncation()
    return parsed


def _pad_token(config: Path) -> str | None:
    """The pad token that a `tokenizer_config.json` names, in either of its two forms."""
    try:
        raw: Any = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise ModelError(
            f"cannot read {config}: {e}; expected a JSON object; repair or delete it"
        ) from e
    pad = raw.get("pad_token") if isinstance(raw, dict) else None
    if isinstance(pad, dict):
        pad = pad.get("content")
    return pad if isinstance(pad, str) else None


def _utf8_safe(text: str) -> str:
    """Lone surrogates cannot be UTF-8; they become question marks, as Python's own encoder does."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _escape(word: str) -> str:
    """`word` as an Oniguruma literal: control characters escaped, blanks left as they are."""
    return re.escape(word).replace("\\ ", " ").replace("\\\n", "\\n")


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte 0..255 in byte-level BPE (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = {byte: chr(byte) for byte in printable}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in stand_ins):
        stand_ins[byte] = chr(256 + offset)
    return [stand_ins[byte] for byte in range(256)]
