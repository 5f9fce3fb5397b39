"""Find hidden or dev items inside a job: exact, normalised, renamed, in pieces, or encoded.

An index holds keyed hashes alone, so it can be handed to a process that must not know the hidden
items. What honest rows contain anyway is taken out of it when it is built: the family's public
generator is sampled, and every fingerprint or phrase that turns up there is dropped. What remains
tells hidden items from chance; the rate of chance matches that is left is measured on a second
honest sample and allowed for.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import random
import re
import secrets
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from nestling.core.errors import Problem
from nestling.families.family import Family, Item
from nestling.families.registry import get
from nestling.families.splits import HIDDEN, EvalSecret, dev_items, hidden_items
from nestling.jobs.rollout_env import Row

__all__ = ["LeakIndex", "LeakMatch", "leak_problems"]

_WORD: Final = re.compile(r"[^\W_][\w-]*|[^\w\s]")
_QUOTED: Final = re.compile(r"(?<!\\)\"((?:[^\"\\\n]|\\.)*)\"|(?<!\\)'((?:[^'\\\n]|\\.)*)'")
"""A quote after a backslash opens nothing, or lines of them would take quadratic time."""
_SWOLLEN: Final = re.compile("[\u3300-\u33ff\ufdfa\ufdfb]")
"""Characters that NFKC makes five or more of; no item has them."""
_ENCODED: Final = re.compile(r"[A-Za-z0-9+/_=-]{24,}")
_GRAM: Final = 6
"""Words of a phrase."""
_MIN_PHRASES: Final = 4
"""An item with fewer phrases of its own cannot be told by phrases."""
_PHRASE_SHARE: Final = 0.6
"""Share of an item's own phrases that give it away."""
_MIN_WORDS: Final = 6
"""Shorter texts are too common to be fingerprints."""
_MIN_CHARS: Final = 20
_HONEST_ROWS: Final = 2000
_MAX_CHANCE: Final = 0.002
"""A reading that more honest rows match than this says nothing in that family."""
_MAX_PHRASE_CHANCE: Final = 0.05
"""The same for phrases: short items share some with many rows, but few share them with 400 items."""
_FALSE_ALARM: Final = 1e-4
_MAX_TEXTS: Final = 50_000
"""Strings looked at in a job's files; a job has at most 2 MiB of them."""
_KINDS: Final = {
    "whole": "whole",
    "whole_renamed": "whole, other names",
    "exact": "word for word",
    "normalised": "other case or marks",
    "reordered": "words reordered",
    "renamed": "other names",
    "phrases": "in pieces",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakMatch:
    """One item found."""

    split: str
    item: int
    kind: str
    """A key of the readings below; `encoded ` in front when it was encoded."""
    where: str
    """Row number or file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakIndex:
    """Hashes of items that must not occur in training data."""

    key: bytes
    fingerprints: Mapping[bytes, tuple[str, int, str]]
    """Hash to split, item number and kind."""
    phrases: Mapping[bytes, tuple[int, ...]]
    """Hash of a phrase to positions in `phrase_counts`."""
    phrase_counts: tuple[tuple[str, int, int], ...]
    """Split, item number and how many phrases of its own the item has."""
    sizes: Mapping[str, int]
    """Split to number of items."""
    chance: float = 0.0
    """How often, at most, one honest row matches one given item as a whole (95 % bound)."""
    phrase_chance: float = 0.0
    """The same for matches in pieces, which are weaker evidence and are counted apart."""

    @classmethod
    def for_family(
        cls,
        family: str,
        secret: EvalSecret,
        *,
        hidden: int,
        dev: int = 64,
        key: bytes | None = None,
    ) -> LeakIndex:
        """The index of a family's first `dev` dev items and `hidden` items of each hidden set.

        `key` as in `build`.
        """
        items: dict[str, Sequence[Item]] = {"dev": dev_items(family, dev)}
        items |= {split: hidden_items(family, split, hidden, secret) for split in HIDDEN}
        return cls.build(get(family), items, key=key)

    @classmethod
    def build(
        cls,
        family: Family,
        items: Mapping[str, Sequence[Item]],
        *,
        honest_rows: int = _HONEST_ROWS,
        key: bytes | None = None,
    ) -> LeakIndex:
        """Index items by split name, for example `dev`, `a`, `b`, `c`. Takes about a second.

        `key` (random by default) hides what is kept and draws the honest rows whose words are no sign of a leak.
        """
        used = key or secrets.token_bytes(16)
        rng = random.Random(int.from_bytes(hashlib.sha256(used).digest()[:8], "big"))
        honest_marks: set[bytes] = set()
        honest_phrases: set[bytes] = set()
        for text in _honest(family, rng, honest_rows):
            honest_marks.update(mark for mark, _ in _fingerprints(text, used))
            honest_phrases.update(_phrases(_words(text.prompt), used))
        fingerprints: dict[bytes, tuple[str, int, str]] = {}
        phrases: dict[bytes, list[int]] = {}
        counts: list[tuple[str, int, int]] = []
        for split, split_items in items.items():
            for number, item in enumerate(split_items):
                text = _Text.of_item(item)
                for mark, kind in _fingerprints(text, used):
                    if mark not in honest_marks:
                        fingerprints.setdefault(mark, (split, number, kind))
                own = set(_phrases(_words(text.prompt), used)) - honest_phrases
                if len(own) >= _MIN_PHRASES:
                    for mark in own:
                        phrases.setdefault(mark, []).append(len(counts))
                    counts.append((split, number, len(own)))
        index = cls(
            key=used,
            fingerprints=fingerprints,
            phrases={mark: tuple(places) for mark, places in phrases.items()},
            phrase_counts=tuple(counts),
            sizes={split: len(split_items) for split, split_items in items.items()},
        )
        return index._calibrated(list(_honest(family, rng, honest_rows)))

    def _calibrated(self, honest: Sequence[_Text]) -> LeakIndex:
        """Without the readings that honest rows match too often, and with the rate of the rest."""
        by_row = [{(m.kind, m.split, m.item) for m in self._match(t, "honest")} for t in honest]
        matches = [match for row in by_row for match in row]
        common = {
            kind
            for kind in _KINDS
            if sum(match[0] == kind for match in matches)
            > (_MAX_PHRASE_CHANCE if kind == "phrases" else _MAX_CHANCE) * len(honest)
        }
        pairs = len(honest) * max(1, sum(self.sizes.values()))
        whole = {match[1:] for match in matches if match[0] not in common | {"phrases"}}
        pieces = sum(match[0] == "phrases" for match in matches)
        return replace(
            self,
            fingerprints={
                mark: value for mark, value in self.fingerprints.items() if value[2] not in common
            },
            phrases={} if "phrases" in common else self.phrases,
            chance=(len(whole) + 3) / pairs,
            phrase_chance=(pieces + 3 + 2 * math.sqrt(pieces)) / pairs,
        )

    def search(self, rows: Sequence[Row], files: Mapping[str, bytes]) -> list[LeakMatch]:
        """Every item found in the rows or in the texts of the files, once each."""
        matches: dict[tuple[str, int], LeakMatch] = {}
        for row in rows:
            data = _loads(row.data_json)
            _note(matches, self._match(_Text.of_row(row.prompt, data), f"row {row.index}"))
            others = [text for text in _strings(data) if text != row.prompt]
            _note(matches, self._match_strings(others, f"row {row.index}"))
        for path, content in files.items():
            source = content.decode("utf-8", "replace")
            _note(matches, self._match_strings(_file_strings(path, source), path))
            _note(matches, self._match_phrases(_words(source), path))
        return list(matches.values())

    def tolerated(self, split: str, num_rows: int, *, in_pieces: bool = False) -> int:
        """Matches that chance explains: honest rows exceed it once in ten thousand jobs."""
        chance = self.phrase_chance if in_pieces else self.chance
        mean = chance * self.sizes[split] * num_rows
        count, term = 0, math.exp(-mean)
        below = term
        while below < 1 - _FALSE_ALARM:
            count += 1
            term *= mean / count
            below += term
        return count

    def dumps(self) -> bytes:
        """The index as bytes, for another process."""
        document = {
            "key": self.key.hex(),
            "fingerprints": {mark.hex(): list(value) for mark, value in self.fingerprints.items()},
            "phrases": {mark.hex(): list(value) for mark, value in self.phrases.items()},
            "phrase_counts": [list(value) for value in self.phrase_counts],
            "sizes": dict(self.sizes),
            "chance": self.chance,
            "phrase_chance": self.phrase_chance,
        }
        return json.dumps(document).encode()

    @classmethod
    def loads(cls, data: bytes) -> LeakIndex:
        """The index back from `dumps`; only for bytes of our own making."""
        document = json.loads(data)
        return cls(
            key=bytes.fromhex(document["key"]),
            fingerprints={
                bytes.fromhex(mark): (split, number, kind)
                for mark, (split, number, kind) in document["fingerprints"].items()
            },
            phrases={
                bytes.fromhex(mark): tuple(places) for mark, places in document["phrases"].items()
            },
            phrase_counts=tuple((s, n, c) for s, n, c in document["phrase_counts"]),
            sizes=document["sizes"],
            chance=document["chance"],
            phrase_chance=document.get("phrase_chance", 0.0),
        )

    def _match(self, text: _Text, where: str) -> Iterator[LeakMatch]:
        for mark, _ in _fingerprints(text, self.key):
            if mark in self.fingerprints:
                split, number, kind = self.fingerprints[mark]
                yield LeakMatch(split=split, item=number, kind=kind, where=where)
        yield from self._match_phrases(_words(text.prompt), where)

    def _match_phrases(self, words: Sequence[str], where: str) -> Iterator[LeakMatch]:
        found: dict[int, int] = {}
        for mark in set(_phrases(words, self.key)):
            for place in self.phrases.get(mark, ()):
                found[place] = found.get(place, 0) + 1
        for place, number in found.items():
            split, item, own = self.phrase_counts[place]
            if number >= _PHRASE_SHARE * own:
                yield LeakMatch(split=split, item=item, kind="phrases", where=where)

    def _match_strings(self, texts: Iterable[str], where: str) -> Iterator[LeakMatch]:
        for text in texts:
            if len(text) < _MIN_CHARS:
                continue
            yield from self._match(_Text(prompt=text), where)
            for decoded in _decoded(text):
                for part in (decoded, *_strings(_loads(decoded))):
                    for match in self._match(_Text(prompt=part), where):
                        yield LeakMatch(
                            split=match.split,
                            item=match.item,
                            kind=f"encoded {match.kind}",
                            where=where,
                        )


def leak_problems(
    index: LeakIndex, rows: Sequence[Row], files: Mapping[str, bytes]
) -> list[Problem]:
    """A problem for each split of which more items occur than chance explains."""
    by_split: dict[str, list[LeakMatch]] = {}
    for match in index.search(rows, files):
        by_split.setdefault(match.split, []).append(match)
    problems = []
    for split, matches in by_split.items():
        pieces = [match for match in matches if match.kind.endswith("phrases")]
        if len(matches) - len(pieces) > index.tolerated(split, len(rows)):
            first = next(match for match in matches if not match.kind.endswith("phrases"))
        elif len(pieces) > index.tolerated(split, len(rows), in_pieces=True):
            first = pieces[0]
        else:
            continue
        which = "example items of TASK.md" if split == "dev" else "items of the hidden eval"
        encoded = "encoded, " if first.kind.startswith("encoded ") else ""
        how = encoded + _KINDS[first.kind.removeprefix("encoded ")]
        problems.append(
            Problem(
                stage="rows",
                code=f"rows.leak_{first.kind.replace(' ', '_')}",
                wrong=f"{first.where} holds an eval item ({how}; {len(matches)} in all)",
                expected=f"no {which}",
                fix="draw rows with sample()",
            )
        )
    return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """A question and, where known, what belongs to it."""

    prompt: str
    rest: str = ""
    """Answer and world as JSON in their own order."""

    @classmethod
    def of_item(cls, item: Item) -> _Text:
        return cls(prompt=item.prompt, rest=json.dumps([item.answer, item.world]))

    @classmethod
    def of_row(cls, prompt: str, data: object) -> _Text:
        if not isinstance(data, dict) or "answer" not in data:
            return cls(prompt=prompt)
        return cls(prompt=prompt, rest=json.dumps([data["answer"], data.get("world", {})]))


def _honest(family: Family, rng: random.Random, count: int) -> Iterator[_Text]:
    lo, hi = family.eval_range
    for _ in range(count):
        yield _Text.of_item(family.sample(rng, lo, hi))


def _fingerprints(text: _Text, key: bytes) -> Iterator[tuple[bytes, str]]:
    """Hashes of the whole question in several readings, each with its kind."""
    words = _words(text.prompt)
    if len(words) >= _MIN_WORDS:
        yield _mark(key, "exact", text.prompt.strip()), "exact"
        bare = [word for word in words if word[0].isalnum()]
        yield _mark(key, "normalised", " ".join(bare)), "normalised"
        yield _mark(key, "reordered", " ".join(sorted(bare))), "reordered"
        yield _mark(key, "renamed", _structure(words)), "renamed"
    if text.rest:
        everything = [*words, *_words(text.rest)]
        yield _mark(key, "whole", " ".join(everything)), "whole"
        yield _mark(key, "whole_renamed", _structure(everything)), "whole_renamed"


def _structure(words: Sequence[str]) -> str:
    """The text with every word replaced by the number of its first appearance; digits are kept."""
    seen: dict[str, str] = {}
    return " ".join(
        seen.setdefault(word, f"w{len(seen)}") if word[0].isalpha() else word for word in words
    )


def _phrases(words: Sequence[str], key: bytes) -> Iterator[bytes]:
    bare = [word for word in words if word[0].isalnum()]
    for start in range(len(bare) - _GRAM + 1):
        yield _mark(key, "phrase", " ".join(bare[start : start + _GRAM]))


def _words(text: str) -> list[str]:
    """Lower-case words, numbers and punctuation marks."""
    plain = _SWOLLEN.sub(" ", text)
    return _WORD.findall(unicodedata.normalize("NFKC", plain).casefold())


def _mark(key: bytes, purpose: str, text: str) -> bytes:
    data = f"{purpose}\0{text}".encode("utf-8", "replace")
    return hashlib.blake2b(data, key=key, digest_size=10).digest()


def _note(into: dict[tuple[str, int], LeakMatch], matches: Iterable[LeakMatch]) -> None:
    for match in matches:
        into.setdefault((match.split, match.item), match)


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _strings(value: object) -> Iterator[str]:
    """All strings inside a JSON value, without recursion."""
    stack = [value]
    while stack:
        current = stack.pop()
        if isinstance(current, str):
            yield current
        elif isinstance(current, dict):
            stack.extend(current.values())
        elif isinstance(current, list):
            stack.extend(current)


def _file_strings(path: str, source: str) -> Iterator[str]:
    """Texts of a file that could each be a question: lines, quoted strings, JSON strings."""
    count = 0
    for line in source.splitlines():
        texts = [line.strip()]
        if path.endswith((".json", ".jsonl")):
            texts += _strings(_loads(line))
        else:
            texts += [first or second for first, second in _QUOTED.findall(line)]
            if path.endswith(".csv"):
                texts += line.split(",")
        for text in texts:
            if text:
                yield text
                count += 1
        if count > _MAX_TEXTS:
            return
    if path.endswith(".json"):
        yield from _strings(_loads(source))


def _decoded(text: str) -> Iterator[str]:
    """What base64 (either alphabet) and hexadecimal parts of a text say, and the text backwards."""
    for part in _ENCODED.findall(text):
        for decode in (_from_base64, _from_hex):
            data = decode(part)
            if data is not None:
                yield data
    if len(text) >= 24:
        yield text[::-1]


def _from_base64(part: str) -> str | None:
    plain = part.replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None


def _from_hex(part: str) -> str | None:
    try:
        return bytes.fromhex(part).decode()
    except (ValueError, UnicodeDecodeError):
        return None
