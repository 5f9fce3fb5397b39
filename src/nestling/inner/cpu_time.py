"""Processor time of this process and everything below it, living or ended."""

from __future__ import annotations

import contextlib

import psutil

__all__ = ["CpuMeter"]


class CpuMeter:
    """Counts from its making, to about 10 ms.

    Whatever descends from this process counts: env workers, whether started cold or forked by a
    warm process, and a scorer, which is idle while a trainer works.
    """

    def __init__(self) -> None:
        self._start_s = _tree_cpu_s()

    def elapsed_s(self) -> float:
        """User and system seconds since the start; never negative."""
        return max(0.0, _tree_cpu_s() - self._start_s)


def _tree_cpu_s() -> float:
    """Each living process adds its own time and that of the children it has reaped."""
    me = psutil.Process()
    total_s = 0.0
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system + times.children_user + times.children_system
    return total_s
