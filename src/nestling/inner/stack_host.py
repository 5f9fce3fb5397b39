"""Starts and ends the stack processes of this machine; a process that dies is started again."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from nestling.core.clock import Clock, SystemClock
from nestling.core.errors import ConfigError
from nestling.inner.own_environment import own_environment
from nestling.inner.stack_config import StackConfig
from nestling.jobs.jail import wait_readable

__all__ = ["StackHost"]

_log = logging.getLogger(__name__)
_MAX_SHORT_LIVES: Final = 5
"""In a row; then the cause is not going away."""
_LONG_LIFE_S: Final = 300.0
"""A process that served for so long did not die of what ends it at its start."""
_RETRY_S: Final = 1.0
"""Before a process is started again that could not even be started."""


class StackHost:
    """The stack processes of some devices; a context manager.

    Sockets lie in a folder of their own that only this user may open, and keep their paths over a restart.
    """

    def __init__(
        self,
        *,
        bases: Mapping[str, Path],
        devices: tuple[str, ...],
        config: StackConfig,
        logs: Path,
        start_wall_s: float = 300.0,
        clock: Clock | None = None,
    ) -> None:
        """`devices` are single ones: `cpu`, `cuda:0`, ...; each process has to serve `start_wall_s` after its start."""
        self._folder = tempfile.TemporaryDirectory(prefix="nestling-stack-")
        self._bases = {name: str(folder.absolute()) for name, folder in bases.items()}
        self._config, self._logs = config, logs
        self._start_wall_s, self._clock = start_wall_s, clock or SystemClock()
        self._devices = {
            device if config.processes == 1 else f"{device}/{number}": device
            for device in devices
            for number in range(config.processes)
        }
        self._sockets = {
            name: str(Path(self._folder.name) / f"{_file_name(name)}.sock")
            for name in self._devices
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started_s: dict[str, float] = {}
        self._is_closing = threading.Event()
        self._watchers: list[threading.Thread] = []

    @property
    def sockets(self) -> tuple[str, ...]:
        """Paths for `stack_client.Stacks`."""
        return tuple(self._sockets.values())

    def __enter__(self) -> StackHost:
        """Start every process and wait until it serves.

        Raises:
            ConfigError: one does not start, or not in time; its last words say why.
        """
        try:
            for name in self._sockets:
                self._processes[name] = self._start(name)
            for name, process in self._processes.items():
                self._await_ready(name, process)
        except BaseException:
            self.close()
            raise
        for name in self._sockets:
            watcher = threading.Thread(
                target=self._watch, args=(name,), name=f"stack {name}", daemon=True
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

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        path = Path(self._sockets[name])
        path.unlink(missing_ok=True)
        self._started_s[name] = self._clock.monotonic()
        with self._log(name) as log:
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
            "device": self._devices[name],
            "config": self._config.model_dump(mode="json"),
        }
        try:
            process.stdin.write(json.dumps(settings).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            _log.debug("the stack of %s ended before it was told anything", name)
        return process

    def _await_ready(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        is_late = not wait_readable(process.stdout.fileno(), self._start_wall_s)
        if is_late or process.stdout.readline() != b"ready\n":
            process.kill()
            process.wait()
            words = self._log_path(name).read_text("utf-8", "replace").strip().splitlines()
            how = f"is not ready after {self._start_wall_s:g} s" if is_late else "does not start"
            raise ConfigError(
                f"the stack process of {name} {how}: {words[-1] if words else 'no word'}; "
                f"expected a usable device; see {self._log_path(name)}"
            )

    def _watch(self, name: str) -> None:
        """Start a process again that died; its jobs are told by the end of their connections."""
        short_lives = 0
        while True:
            process = self._processes[name]
            code = process.wait()
            if self._is_closing.is_set():
                return
            _close_pipes(process)
            lived_s = self._clock.monotonic() - self._started_s[name]
            short_lives = 0 if lived_s >= _LONG_LIFE_S else short_lives + 1
            if short_lives > _MAX_SHORT_LIVES:
                _log.error("the stack of %s keeps dying; see %s", name, self._log_path(name))
                return
            _log.warning("the stack of %s ended with code %d; starting it again", name, code)
            try:
                self._processes[name] = self._start(name)
            except OSError as error:  # counts as a life: the one that ended is waited for again
                _log.warning("the stack of %s cannot be started: %s", name, error)
                self._is_closing.wait(_RETRY_S)
            if self._is_closing.is_set():
                self._processes[name].kill()

    def _log(self, name: str) -> IO[bytes]:
        path = self._log_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")

    def _log_path(self, name: str) -> Path:
        return self._logs / f"stack-{_file_name(name)}.log"


def _file_name(name: str) -> str:
    return name.replace(":", "-").replace("/", "-")


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # settings that it never read
                pipe.close()
