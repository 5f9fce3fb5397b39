"""Token ids, log-probabilities and yes/no lists as compact bytes.

Little-endian and fixed width, so a file moves between machines: ids as uint32, log-probabilities as
float32 (exact for values that come from a float32 tensor), flags as bits.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from nestling.core.errors import StoreError

__all__ = ["pack_flags", "pack_floats", "pack_ids", "unpack_flags", "unpack_floats", "unpack_ids"]


def pack_ids(ids: Sequence[int]) -> bytes:
    """Four bytes a token; `OverflowError` outside 0 .. 2^32-1."""
    return _bytes(array("I", ids))


def unpack_ids(blob: bytes) -> list[int]:
    """What `pack_ids` packed."""
    return _array("I", blob).tolist()


def pack_floats(values: Sequence[float]) -> bytes:
    """Four bytes a value."""
    return _bytes(array("f", values))


def unpack_floats(blob: bytes) -> list[float]:
    """What `pack_floats` packed, to float32."""
    return _array("f", blob).tolist()


def pack_flags(flags: Sequence[bool]) -> bytes:
    """One bit a flag, after four bytes of length."""
    bits = bytearray((len(flags) + 7) // 8)
    for index, flag in enumerate(flags):
        if flag:
            bits[index >> 3] |= 1 << (index & 7)
    return len(flags).to_bytes(4, "little") + bytes(bits)


def unpack_flags(blob: bytes) -> list[bool]:
    """What `pack_flags` packed."""
    count = int.from_bytes(blob[:4], "little")
    if len(blob) != 4 + (count + 7) // 8:
        raise StoreError(
            f"a flag list of {count} has {len(blob)} bytes; the run store is damaged; "
            f"restore a backup"
        )
    return [bool(blob[4 + (index >> 3)] >> (index & 7) & 1) for index in range(count)]


def _bytes(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _array(kind: str, blob: bytes) -> array:  # type: ignore[type-arg]
    if len(blob) % 4:
        raise StoreError(
            f"a list of four-byte values has {len(blob)} bytes; the run store is damaged; "
            f"restore a backup"
        )
    values = array(kind)
    values.frombytes(blob)
    if sys.byteorder == "big":
        values.byteswap()
    return values
