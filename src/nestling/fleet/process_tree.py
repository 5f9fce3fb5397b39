"""Find and end a worker process with everything it started.

A process is told from a later one with the same number by its start time and the boot. A worker
leads its own session; what it starts is found by session, by descent, and by a marker in the
environment that children inherit even when they make a session of their own.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["MARKER", "boot_id", "end_tree", "is_running", "marker_of", "start_ticks", "tree"]

MARKER = "NESTLING_WORKER"
"""Environment variable: run and worker name."""

_START_FIELD = 19
"""Index of the start time in /proc/<pid>/stat after the command's closing bracket (proc(5))."""
_LOOK_S = 0.02


def boot_id() -> str:
    """Which start of the machine this is."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        return f"{psutil.boot_time():.0f}"


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[_START_FIELD])


def is_running(pid: int, ticks: int) -> bool:
    """Whether that very process still runs."""
    return start_ticks(pid) == ticks


def marker_of(process: psutil.Process) -> str:
    """The marker a process inherited; empty when it has none or may not be read."""
    try:
        return str(process.environ().get(MARKER, ""))
    except (psutil.Error, OSError):
        return ""


def tree(pid: int | None, marker: str) -> set[int]:
    """Every live process of the session and the descent of `pid`, and all with the marker."""
    found: set[int] = set()
    for process in psutil.process_iter():
        if marker_of(process) == marker or _session(process.pid) == pid:
            found.add(process.pid)
            with suppress(psutil.Error):
                found |= {child.pid for child in process.children(recursive=True)}
    found.discard(os.getpid())
    return {one for one in found if start_ticks(one) is not None}


def end_tree(pid: int | None, marker: str, *, rounds: int = 100) -> list[int]:
    """Kill the tree, again until nothing is left; blocks for a moment between looks.

    Returns what is still there after `rounds` looks (a process in an uninterruptible call).
    """
    left: set[int] = set()
    for _ in range(rounds):
        left = tree(pid, marker)
        if not left:
            return []
        for one in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        time.sleep(_LOOK_S)
    return sorted(left)


def _session(pid: int) -> int:
    """A process's session; -1 when it is gone."""
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return -1
