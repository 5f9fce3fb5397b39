"""Workers as processes of this machine, one thread each.

A worker leads its own session, dies with its controller (parent-death signal and the end of its
pipe), and is ended with everything it started. What a killed controller left behind is found by the
store's process records and by a marker in the environment.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from nestling.core.errors import FleetError
from nestling.fleet import process_tree
from nestling.fleet.finish import finish
from nestling.fleet.memory import OVER_SHARE, MemoryGuard, MemoryLimits
from nestling.fleet.messages import (
    HEADER_BYTES,
    Done,
    Failed,
    FromWorker,
    ToWorker,
    Work,
    decode_from_worker,
    encode,
    frame_length,
)
from nestling.fleet.provider import WorkerEndedError
from nestling.fleet.slots import Slot
from nestling.fleet.worker_process import last_words, worker_command, worker_environment
from nestling.store import GroupCommit
from nestling.store.processes import ProcessRecord

__all__ = ["LocalNode", "LocalProvider", "LocalWorkers", "cores_here", "num_slots"]


def cores_here() -> tuple[int, ...]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def num_slots() -> int:
    """How many cores that is."""
    return len(cores_here())


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorkers:
    """How to start a worker."""

    handlers: str
    """`module:function` that makes the handlers."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """JSON for that function; no secrets, as any user can read a command line."""
    logs: Path
    """Folder for one log file per worker."""
    machine: str = "cpu-core"
    lane: str = "cpu"
    beat_s: float = 5.0
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the scrubbed environment."""
    slots: Sequence[Slot] = ()
    """What each worker has, by its number; empty: one thread and no GPU each."""
    memory: MemoryLimits | None = None
    """None: nobody watches."""


class LocalNode:
    """A worker process and its pipes."""

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self.name = name
        self.process = process
        self._log = log
        self._length: int | None = None
        self._ended: WorkerEndedError | None = None
        self._num_jobs = 0
        self._is_busy = False

    async def send(self, message: ToWorker) -> None:
        """Hand a message over; `FleetError` when the worker is gone."""
        stdin = self.process.stdin
        assert stdin is not None
        if isinstance(message, Work):
            self._num_jobs += 1
            self._is_busy = True
        try:
            stdin.write(encode(message))
            await stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise FleetError(f"worker {self.name} is gone; its log is {self._log}") from error

    async def receive(self) -> FromWorker:
        """The next message; `FleetError` when the worker is gone. Cancelling loses nothing."""
        stdout = self.process.stdout
        assert stdout is not None
        try:
            # The length survives a cancellation between header and body.
            if self._length is None:
                self._length = frame_length(await stdout.readexactly(HEADER_BYTES))
            body = await stdout.readexactly(self._length)
        except asyncio.IncompleteReadError as error:
            if self._ended is not None:
                raise self._ended from error
            raise FleetError(f"worker {self.name} is gone; its log is {self._log}") from error
        self._length = None
        message = decode_from_worker(body)
        if isinstance(message, Done | Failed):
            self._is_busy = False
        return message

    def blame(self, reason: str, detail: str) -> None:
        """Have `receive` say why the worker is about to be ended; nobody is blamed when it idles.

        A worker's first job is tried no more. A later one is: it may suffer for an earlier one.
        """
        if self._is_busy:
            self._ended = WorkerEndedError(reason, detail, retry=self._num_jobs > 1)

    async def last_words(self) -> str:
        """The end of its log."""
        return await asyncio.to_thread(last_words, self._log)

    async def close(self) -> None:
        """Collect the exit status and close the pipes; the process must be dead or dying."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        await self.process.wait()


class LocalProvider:
    """Starts workers on this machine."""

    def __init__(self, workers: LocalWorkers, writer: GroupCommit) -> None:
        self._workers = workers
        self._writer = writer
        self._nodes: dict[str, LocalNode] = {}
        path = str(writer.store.path.resolve())
        self.guard = (
            None
            if workers.memory is None
            else MemoryGuard(limits=workers.memory, workers=self._pids, end=self._end_for_memory)
        )
        """For the pool."""
        self._run_id = hashlib.sha256(path.encode()).hexdigest()[:16]

    @property
    def machine(self) -> str:
        """Machine type in the price table."""
        return self._workers.machine

    @property
    def lane(self) -> str:
        """Which jobs its workers may take."""
        return self._workers.lane

    def marker(self, name: str) -> str:
        """What every process of a worker carries in its environment."""
        return f"{self._run_id}/{name}"

    async def launch(self, name: str) -> LocalNode:
        """Start a worker, or return the running one of that name."""
        node = self._nodes.get(name)
        if node is not None and node.process.returncode is None:
            return node
        await self.terminate(name)
        node = self._nodes[name] = await self._spawn(name)
        pid = node.process.pid
        ticks = process_tree.start_ticks(pid)
        if ticks is not None:
            boot = process_tree.boot_id()
            await self._writer.run(
                lambda: self._writer.store.processes.add(
                    name, pid=pid, start_ticks=ticks, boot_id=boot
                )
            )
        return node

    async def list(self) -> Sequence[str]:
        """Names of workers that run, also those that an earlier controller left behind."""
        records = await self._writer.run(self._writer.store.processes.all)
        boot = process_tree.boot_id()
        return [
            record.name
            for record in records
            if record.boot_id == boot and process_tree.is_running(record.pid, record.start_ticks)
        ]

    async def terminate(self, name: str) -> None:
        """End a worker and everything it started; fine when it is gone already."""
        await finish(self._terminate(name))

    async def sweep(self) -> Sequence[str]:
        """End what an earlier controller of this run left behind; returns the names."""
        records = await self._writer.run(self._writer.store.processes.all)
        names = {record.name for record in records} - self._nodes.keys()
        names |= await asyncio.to_thread(_marked, f"{self._run_id}/") - self._nodes.keys()
        for name in sorted(names):
            await self.terminate(name)
        return sorted(names)

    async def close(self) -> None:
        """End every worker."""
        for name in tuple(self._nodes):
            await self.terminate(name)

    async def _spawn(self, name: str) -> LocalNode:
        workers = self._workers
        log = workers.logs / f"{name}.log"
        cores = self._slot(name).cores
        command = worker_command(workers.handlers, workers.settings, workers.beat_s, cores)
        try:
            stderr = await asyncio.to_thread(_open_log, log)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=stderr,
                    env=self._environment(name),
                    start_new_session=True,
                )
            finally:
                os.close(stderr)
        except OSError as error:
            raise FleetError(
                f"cannot start worker {name}: {error.strerror or error}; expected free processes, "
                f"memory and a writable {workers.logs}"
            ) from error
        return LocalNode(name, process, log)

    def _environment(self, name: str) -> dict[str, str]:
        slot = self._slot(name).environment()
        return worker_environment(self.marker(name), slot, self._workers.environment)

    def _slot(self, name: str) -> Slot:
        """By the number at the end of a worker's name."""
        slots, number = self._workers.slots, name.rpartition("-")[2]
        return slots[int(number)] if slots and number.isdecimal() else Slot(threads=1)

    def _pids(self) -> dict[str, int]:
        return {
            name: node.process.pid
            for name, node in self._nodes.items()
            if node.process.returncode is None
        }

    async def _end_for_memory(self, name: str, detail: str) -> None:
        node = self._nodes.get(name)
        if node is None:
            return
        node.blame(OVER_SHARE, detail)
        await asyncio.to_thread(process_tree.end_tree, node.process.pid, self.marker(name))

    async def _terminate(self, name: str) -> None:
        node = self._nodes.pop(name, None)
        store = self._writer.store
        records = await self._writer.run(store.processes.all)
        record = next((one for one in records if one.name == name), None)
        pid = node.process.pid if node is not None else _live_pid(record)
        left = await asyncio.to_thread(process_tree.end_tree, pid, self.marker(name))
        if left:
            raise FleetError(
                f"worker {name}: processes {left} cannot be ended; they are stuck in the kernel; "
                f"restart the machine if they stay"
            )
        if node is not None:
            await node.close()
        if record is not None:
            await self._writer.run(lambda: store.processes.remove(name, "ended"))


def _live_pid(record: ProcessRecord | None) -> int | None:
    """The recorded process, unless its number has been given to another one since."""
    if record is None or record.boot_id != process_tree.boot_id():
        return None
    return (
        record.pid if process_tree.start_ticks(record.pid) in (None, record.start_ticks) else None
    )


def _marked(prefix: str) -> set[str]:
    """Names of workers whose marker is in the environment of some process."""
    names: set[str] = set()
    for process in psutil.process_iter():
        marker = process_tree.marker_of(process)
        if marker.startswith(prefix):
            names.add(marker.removeprefix(prefix))
    return names


def _open_log(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
