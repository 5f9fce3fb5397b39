"""A seeded mutator, and what may not grow."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

TOKENS = [
    b"<tool_call>", b"</tool_call>", b"<|im_end|>", b"<|im_start|>", b'"', b"'", b"\\", b"{", b"}",
    b"[", b"]", b"[[[[", b":", b",", b"null", b"true", b"NaN", b"Infinity", b"-1", b"1e999", b"9" * 40,
    b"9" * 5000, b"\\ud800", b"\\u0000", b"\0", b"\xff", b"\xed\xa0\x80", b"../", b"/", b"\n", b"\r",
    "\u202e".encode(), "\ufdfa".encode(), b'{"a":' * 50, b'"name"', b'"arguments"', b"__class__",
    b'"""', b"#", b"=", b" " * 300, b"(" * 90, b"\t" * 90, b"\x80\x7f", b"F32", b"data_offsets",
]  # fmt: skip


VALUES = [None, True, False, 0, -1, 2**31, 2**53, 2**70, 1e308, -0.0, "", "x" * 5000, "\ud800", "\0",
          "../x", [], {}, [[]], {"a": {}}, [0] * 3000, "1", "\u0661", 1.5]  # fmt: skip


def _nodes(tree: object) -> list[tuple[dict | list, object]]:
    found: list[tuple[dict | list, object]] = []
    todo: list[object] = [tree]
    while todo:
        node = todo.pop()
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            found.append((node, key))
            if isinstance(value, dict | list):
                todo.append(value)
    return found


def _reshape(data: bytes, rng: random.Random) -> bytes | None:
    """The JSON object inside the data with one node replaced, doubled or dropped; None without one."""
    start, end = data.find(b"{"), data.rfind(b"}") + 1
    try:
        tree = json.loads(data[start:end])
    except (ValueError, RecursionError):
        return None
    nodes = _nodes(tree)
    if not nodes:
        return None
    for _ in range(rng.choice((1, 1, 2, 4))):
        parent, key = rng.choice(nodes)
        other, place = rng.choice(nodes)
        try:
            match rng.randrange(4):
                case 0:
                    parent[key] = rng.choice(VALUES)
                case 1:
                    parent[key] = json.loads(json.dumps(other[place]))
                case 2 if isinstance(parent, dict):
                    parent[str(rng.choice(VALUES))[:50]] = parent.pop(key)
                case _:
                    del parent[key]
        except (LookupError, ValueError):
            continue
    return data[:start] + json.dumps(tree).encode() + data[end:]


def mutants(seeds: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """`count` damaged versions of the seeds; the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(rng.choice(seeds))
        reshaped = _reshape(bytes(data), rng) if rng.random() < 0.5 else None
        if reshaped is not None:
            yield reshaped
            continue
        for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
            _mutate(data, seeds, rng)
        yield bytes(data[:400_000])


def _mutate(data: bytearray, seeds: Sequence[bytes], rng: random.Random) -> None:
    at = rng.randint(0, len(data))
    end = min(len(data), at + rng.choice((1, 2, 8, 64, 1000)))
    match rng.randrange(9):
        case 0 if data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        case 1:
            data[at:at] = rng.choice(TOKENS)
        case 2:
            data[at:end] = rng.choice(TOKENS)
        case 3:
            del data[at:end]
        case 4:
            data[at:at] = data[at:end] * rng.choice((1, 2, 50))
        case 5:
            del data[at:]
        case 6:
            other = rng.choice(seeds)
            data[at:] = other[rng.randint(0, len(other)) :]
        case 7:
            data[at:end] = rng.randbytes(end - at)
        case _:
            data[at:at] = rng.randbytes(rng.choice((1, 4, 30)))


@pytest.fixture
def resident_mib() -> Callable[[], float]:
    """Memory of this process."""

    def read() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    return read


@pytest.fixture
def mutated() -> Callable[[Sequence[bytes], int, int], Iterator[bytes]]:
    return mutants
