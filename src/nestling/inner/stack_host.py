"""Starts and ends the stack processes of this machine; a process that dies is started again."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from nestling.core.errors import ConfigError
from nestling.inner.own_environment import own_environment
from nestling.inner.stack_config import StackConfig

__all__ = ["StackHost"]

_log = logging.getLogger(__name__)
_MAX_RESTARTS: Final = 5


class StackHost:
    """One stack process per device; a context manager.

    Sockets lie in a folder of their own that only this user may open, and keep their paths over a restart.
    """

    def __init__(
        self,
        *,
        bases: Mapping[str, Path],
        devices: tuple[str, ...],
        config: StackConfig,
        logs: Path,
    ) -> None:
        """`devices` are single ones: `cpu`, `cuda:0`, ..."""
        self._folder = tempfile.TemporaryDirectory(prefix="nestling-stack-")
        self._bases = {name: str(folder.absolute()) for name, folder in bases.items()}
        self._config, self._logs = config, logs
        self._sockets = {
            device: str(Path(self._folder.name) / f"{device.replace(':', '-')}.sock")
            for device in devices
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._is_closing = threading.Event()
        self._watchers: list[threading.Thread] = []

    @property
    def sockets(self) -> tuple[str, ...]:
        """Paths for `stack_client.Stacks`."""
        return tuple(self._sockets.values())

    def __enter__(self) -> StackHost:
        """Start every process and wait until it serves.

        Raises:
            ConfigError: one does not start; its last words say why.
        """
        try:
            for device in self._sockets:
                self._processes[device] = self._start(device)
            for device, process in self._processes.items():
                self._await_ready(device, process)
        except BaseException:
            self.close()
            raise
        for device in self._sockets:
            watcher = threading.Thread(
                target=self._watch, args=(device,), name=f"stack {device}", daemon=True
            )
            watcher.start()
            self._watchers.append(watcher)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def process_ids(self) -> tuple[int, ...]:
        """Of the running processes."""
        return tuple(process.pid for process in self._processes.values())

    def close(self) -> None:
        """End the processes at once; may be called twice."""
        self._is_closing.set()
        for process in self._processes.values():
            process.kill()
        for watcher in self._watchers:
            watcher.join()
        for process in self._processes.values():
            process.wait()
            _close_pipes(process)
        self._folder.cleanup()

    def _start(self, device: str) -> subprocess.Popen[bytes]:
        path = Path(self._sockets[device])
        path.unlink(missing_ok=True)
        with self._log(device) as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nestling.inner.stack_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=own_environment(),
                start_new_session=True,
            )
        assert process.stdin is not None
        settings = {
            "socket": str(path),
            "bases": self._bases,
            "device": device,
            "config": self._config.model_dump(mode="json"),
        }
        try:
            process.stdin.write(json.dumps(settings).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            _log.debug("the stack of %s ended before it was told anything", device)
        return process

    def _await_ready(self, device: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            process.wait()
            words = self._log_path(device).read_text("utf-8", "replace").strip().splitlines()
            raise ConfigError(
                f"the stack process of {device} does not start: {words[-1] if words else 'no word'}; "
                f"expected a usable device; see {self._log_path(device)}"
            )

    def _watch(self, device: str) -> None:
        """Start a process again that died; its jobs are told by the end of their connections."""
        for _ in range(_MAX_RESTARTS):
            process = self._processes[device]
            code = process.wait()
            if self._is_closing.is_set():
                return
            _log.warning("the stack of %s ended with code %d; starting it again", device, code)
            _close_pipes(process)
            self._processes[device] = self._start(device)
            if self._is_closing.is_set():
                self._processes[device].kill()
        self._processes[device].wait()
        if not self._is_closing.is_set():
            _log.error("the stack of %s keeps dying; see %s", device, self._log_path(device))

    def _log(self, device: str) -> IO[bytes]:
        path = self._log_path(device)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")

    def _log_path(self, device: str) -> Path:
        return self._logs / f"stack-{device.replace(':', '-')}.log"


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
