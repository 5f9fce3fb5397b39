"""Memory that a process has freed but still holds."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

__all__ = ["trim_heap"]


def trim_heap() -> None:
    """Give freed heap pages back to the system: takes milliseconds, for the end of a piece of work.

    glibc keeps what tensors of a few megabytes leave behind, so that several processes that are never
    busy at once would each hold their own peak. Elsewhere it does nothing. See malloc_trim(3).
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # musl has none
        return None
    return trim
