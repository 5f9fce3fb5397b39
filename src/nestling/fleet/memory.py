"""Keeps workers within their share of the machine's memory, and the machine out of trouble.

Once a second one look at all processes adds up each worker's tree. A tree over its share is ended
before the kernel picks a victim of its own choice. Pages that several processes share count once:
the cheap sum (resident sets) only says which trees need the exact one (proportional sets). While
the machine itself is short of memory, no new job is given out, except one when none runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from nestling.core.errors import ConfigError

__all__ = [
    "OVER_SHARE",
    "MemoryGuard",
    "MemoryLimits",
    "available_bytes",
    "memory_limits",
    "tree_bytes",
]

OVER_SHARE = "memory.over_share"
"""Reason of a job whose worker took more than its share."""

_GIB = 2**30
_SHARED_OUT = 0.9
"""Of a machine's memory; the rest is the controller's."""
_IDLE_GIB = 0.6
"""A warm worker with its scorer and jail zygote; measured 0.5 on a CPU."""
_GROUP = Path("/sys/fs/cgroup")
"""As a container sees its own; on a machine itself the root has no limit."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PPID, _SESSION, _RSS = 1, 3, 21
"""Places in /proc/<pid>/stat after the command's closing bracket (proc(5))."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """What the workers of one machine may take."""

    worker_gib: float
    """One worker with everything it started."""
    least_free_gib: float
    """Below this, no new job."""
    every_s: float = 1.0


@dataclass(slots=True, kw_only=True)
class MemoryGuard:
    """Watches the workers of a provider; `has_room` says whether new jobs may start."""

    limits: MemoryLimits
    workers: Callable[[], Mapping[str, int]]
    """Names and process ids of the workers that run."""
    end: Callable[[str, str], Awaitable[None]]
    """Ends a worker, and why."""
    available: Callable[[], int] = field(default_factory=lambda: available_bytes)
    """Bytes that the machine could still give."""
    has_room: bool = True

    async def watch(self) -> None:
        """Look again and again; runs until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self.limits.every_s)

    async def look(self) -> None:
        """One look: end who takes too much, note whether there is room."""
        workers = dict(self.workers())
        free = self.available()
        had_room, self.has_room = self.has_room, free >= self.limits.least_free_gib * _GIB
        if had_room and not self.has_room:
            _log.warning(
                "%.1f GiB of memory are free, less than %.1f; no new jobs until there is more",
                free / _GIB,
                self.limits.least_free_gib,
            )
        limit = self.limits.worker_gib * _GIB
        taken = await asyncio.to_thread(tree_bytes, list(workers.values()), limit)
        for name, pid in workers.items():
            if taken.get(pid, 0) > limit:
                await self.end(
                    name,
                    f"the job and its worker took {taken[pid] / _GIB:.2f} GiB of memory; expected "
                    f"at most {self.limits.worker_gib:.2f} GiB, the share of one worker; use a "
                    f"smaller base, batch or environment, or raise fleet.worker_memory_gib",
                )


def tree_bytes(pids: Sequence[int], limit: float) -> dict[int, int]:
    """Memory of each process with its descendants and its session, exact where above `limit`."""
    parents, sessions, resident = _all_processes()
    roots = set(pids)
    trees: dict[int, list[int]] = {pid: [] for pid in pids}
    for pid in resident:
        root = _root(pid, parents, sessions, roots)
        if root is not None:
            trees[root].append(pid)
    found = {}
    for root, members in trees.items():
        total = sum(resident[pid] for pid in members)
        if total > limit:
            total = sum(_proportional(pid, resident[pid]) for pid in members)
        found[root] = total
    return found


def available_bytes() -> int:
    """What can be taken without swapping, within this process's memory cgroup (version 2)."""
    machine = int(psutil.virtual_memory().available)
    most = _group_limit()
    if most is None:
        return machine
    try:
        used = int((_GROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        droppable = int(stat.get("inactive_file", 0))
        return min(machine, most - used + droppable)
    except (OSError, ValueError):
        return machine


def memory_limits(
    *, worker_gib: float, num_workers: int, least_free_gib: float, machine_gib: float | None = None
) -> MemoryLimits:
    """Limits of a machine; a share of 0 is nine tenths of its memory over the workers.

    Raises `ConfigError` when that leaves a worker less than it needs before it does anything.
    """
    total_gib = _total_bytes() / _GIB if machine_gib is None else machine_gib
    share_gib = worker_gib or _SHARED_OUT * total_gib / num_workers
    if share_gib < _IDLE_GIB:
        raise ConfigError(
            f"{num_workers} workers on {total_gib:.1f} GiB have {share_gib:.2f} GiB each; expected "
            f"at least {_IDLE_GIB:g} GiB; lower fleet.workers"
        )
    return MemoryLimits(worker_gib=share_gib, least_free_gib=least_free_gib)


def _total_bytes() -> int:
    """All memory of the machine, or what the cgroup allows of it."""
    machine = int(psutil.virtual_memory().total)
    most = _group_limit()
    return machine if most is None else min(machine, most)


def _group_limit() -> int | None:
    """What the memory cgroup of a container allows; None without a limit."""
    try:
        most = (_GROUP / "memory.max").read_text().strip()
        return None if most == "max" else int(most)
    except (OSError, ValueError):
        return None


def _all_processes() -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Parent, session and resident bytes of every process."""
    parents, sessions, resident = {}, {}, {}
    for pid in psutil.pids():
        with suppress(OSError, IndexError, ValueError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            parents[pid] = int(fields[_PPID])
            sessions[pid] = int(fields[_SESSION])
            resident[pid] = int(fields[_RSS]) * _PAGE
    return parents, sessions, resident


def _root(
    pid: int, parents: Mapping[int, int], sessions: Mapping[int, int], roots: set[int]
) -> int | None:
    """The worker that a process belongs to: by descent, or by the session of an ancestor."""
    seen: set[int] = set()
    while pid in parents and pid not in seen:
        if pid in roots:
            return pid
        if sessions[pid] in roots:
            return sessions[pid]
        seen.add(pid)
        pid = parents[pid]
    return None


def _proportional(pid: int, resident: int) -> int:
    """Resident bytes with shared pages divided among those that share them.

    0 when the process is gone; all its resident bytes when it hides the rest.
    """
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except (OSError, ValueError):
        return resident
    return 0
