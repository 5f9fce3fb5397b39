"""Memory and process caps for a whole jail, where this process may make a cgroup v2."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path
from typing import Final

__all__ = ["JailCgroup"]

_ROOT: Final = Path("/sys/fs/cgroup")
_REMOVE_TRIES: Final = 50
_counter = itertools.count()


class JailCgroup:
    """A cgroup below this process's own; the kernel kills within it what exceeds its memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, *, memory_bytes: int, processes: int) -> JailCgroup | None:
        """A new cgroup, or None where there is no writable cgroup v2 with these controllers."""
        parent = _own_cgroup()
        if parent is None:
            return None
        path = parent / f"nestling-{os.getpid()}-{next(_counter)}"
        try:
            enabled = (parent / "cgroup.subtree_control").read_text().split()
            if not {"memory", "pids"} <= set(enabled):
                (parent / "cgroup.subtree_control").write_text("+memory +pids")
            path.mkdir()
        except OSError:
            return None
        group = cls(path)
        try:
            (path / "memory.max").write_text(str(memory_bytes))
            (path / "pids.max").write_text(str(processes))
            with contextlib.suppress(OSError):  # absent without swap accounting
                (path / "memory.swap.max").write_text("0")
        except OSError:
            group.remove()
            return None
        return group

    def add(self, pid: int) -> None:
        """Move a process in; what it starts later follows.

        Raises:
            OSError: the process is gone or the system refused.
        """
        (self.path / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Kill what is left inside and delete the cgroup; may be repeated."""
        with contextlib.suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")
        for _ in range(_REMOVE_TRIES):
            try:
                self.path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.01)  # the kernel is still reaping
            else:
                return


def _own_cgroup() -> Path | None:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next((line[3:] for line in lines if line.startswith("0::")), None)
        if own is None or not (_ROOT / "cgroup.controllers").is_file():
            return None
        path = _ROOT / own.lstrip("/")
        controllers = set((path / "cgroup.controllers").read_text().split())
    except OSError:
        return None
    return path if {"memory", "pids"} <= controllers else None
