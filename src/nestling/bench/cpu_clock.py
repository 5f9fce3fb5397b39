"""Processor time by part: this process, the processes below it, and single functions."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

__all__ = ["CpuClock", "below_cpu_s", "timed"]


def below_cpu_s() -> float:
    """Of all living processes below this one, threads included; nanoseconds where the kernel counts them."""
    total_s = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            total_s += _process_cpu_s(process)
    return total_s


class CpuClock:
    """Counts from its making; processes that end in between are no longer counted."""

    def __init__(self) -> None:
        self._own_s = time.process_time()
        self._below_s = below_cpu_s()

    def own_s(self) -> float:
        """Of this process."""
        return time.process_time() - self._own_s

    def below_s(self) -> float:
        """Of the processes below it."""
        return max(0.0, below_cpu_s() - self._below_s)

    def total_s(self) -> float:
        """Both."""
        return self.own_s() + self.below_s()


@contextlib.contextmanager
def timed(owner: type, *names: str) -> Iterator[Callable[[], float]]:
    """Processor seconds of this process inside these methods while the block runs; a call within another counts once."""
    spent_s, depth = 0.0, 0

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: object, **given: object) -> object:
            nonlocal spent_s, depth
            depth += 1
            started_s = time.process_time()
            try:
                return function(*args, **given)
            finally:
                depth -= 1
                if depth == 0:
                    spent_s += time.process_time() - started_s

        return run

    originals = {name: getattr(owner, name) for name in names}
    for name, function in originals.items():
        setattr(owner, name, wrapped(function))
    try:
        yield lambda: spent_s
    finally:
        for name, function in originals.items():
            setattr(owner, name, function)


def _process_cpu_s(process: psutil.Process) -> float:
    try:
        tasks = list(Path(f"/proc/{process.pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except (OSError, ValueError, IndexError):
        times = process.cpu_times()
        return float(times.user + times.system)
