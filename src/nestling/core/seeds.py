"""Named random streams: the same root and names always give the same numbers."""

from __future__ import annotations

import hashlib
import random

__all__ = ["derive_seed", "stream"]


def derive_seed(root: int | bytes, *names: str | int) -> int:
    """A 63-bit seed for one named purpose; SHA-256 of the root and the names."""
    digest = hashlib.sha256()
    digest.update(root if isinstance(root, bytes) else str(root).encode())
    for name in names:
        digest.update(b"\x00" + str(name).encode())
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def stream(root: int | bytes, *names: str | int) -> random.Random:
    """A generator for one named purpose; not for secrets that must resist prediction."""
    return random.Random(derive_seed(root, *names))
