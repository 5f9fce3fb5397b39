"""Processor time of this process and of the children it has waited for."""

from __future__ import annotations

import resource

__all__ = ["CpuMeter"]


class CpuMeter:
    """Counts from its making; a child counts once it has ended and was waited for."""

    def __init__(self) -> None:
        self._start_s = _now_s()

    def elapsed_s(self) -> float:
        """User and system seconds since the start."""
        return _now_s() - self._start_s


def _now_s() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
