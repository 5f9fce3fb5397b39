"""Env workers that start warm: fork a process that has imported verifiers, inside a fresh jail.

Importing verifiers costs seconds; a fork costs milliseconds. The zygote imports once, never runs
agent code and holds no secret. For each job bubblewrap makes new namespaces around a sleeping
process; a child of the zygote joins them, forks into the process namespace, drops every
descriptor, limit and privilege, and serves that one job until it dies. Nothing comes back to the
zygote, and no job sees what another one did. What a forked worker shares with its siblings is the
memory layout and contents of freshly imported libraries.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import tempfile
import threading
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Final

from nestling.core.errors import ConfigError, JailError
from nestling.jobs.jail import WORKER_ENVIRONMENT, Jail, JailedProcess, JailLimits, wait_readable
from nestling.jobs.jail_runtime import python_runtime

__all__ = ["Zygote"]

_NAMESPACES: Final = ("mnt", "net", "ipc", "uts", "pid")
_NS_GET_USERNS: Final = 0xB701
_MAX_MESSAGE_BYTES: Final = 4096
_FORK_TIMEOUT_S: Final = 15.0
_IMPORT_TIMEOUT_S: Final = 120.0

_SLEEPER: Final = "echo ready >/proc/self/fd/{ready}; exec sleep 2147483647"
"""First program in a jail: says that mounts are done, then keeps the namespaces alive."""

_BOOT: Final = """\
import sys
sys.path[len(sys.path):] = {sys_path!r}
from nestling.jobs.jail_zygote import run_zygote
run_zygote({control})
"""


class Zygote:
    """A warm `EnvStarter`; share one per trainer process, close it at the end.

    It imports in the background from the moment it is made; the first start waits for that.
    Calls from several threads are taken one at a time.

    Raises:
        ConfigError: the jail is `unsafe`; a zygote only makes sense inside namespaces.
    """

    def __init__(self, jail: Jail) -> None:
        if jail.unsafe:
            raise ConfigError("a zygote needs a jail; fix: start workers cold when unsafe")
        self._jail = jail
        self._lock = threading.Lock()
        self._warm = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        source = str(Path(__file__).parents[2])
        boot = _BOOT.format(
            sys_path=[source, *python_runtime().sys_path[1:]], control=theirs.fileno()
        )
        with theirs, tempfile.TemporaryFile() as program:
            program.write(boot.encode())
            program.seek(0)
            self._process = subprocess.Popen(  # noqa: S603 (our own interpreter and program)
                [python_runtime().python, "-P", "-s", "-S", "-B", "-"],
                stdin=program,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=dict(WORKER_ENVIRONMENT),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def start_worker(
        self, *, job_dir: Path, limits: JailLimits, request_fd: int, reply_fd: int, log_fd: int
    ) -> JailedProcess:
        """Make a jail around `job_dir` and fork a worker into it.

        Raises:
            JailError: `jail.start` or `jail.zygote`.
        """
        ready_read, ready_write = os.pipe()
        with FileIO(ready_read) as ready:
            try:
                command = ["/bin/sh", "-c", _SLEEPER.format(ready=ready_write)]
                jailed = self._jail.start_command(
                    command, job_dir=job_dir, limits=limits, keep_fds=(ready_write,), log_fd=log_fd
                )
            finally:
                os.close(ready_write)
            try:
                if not (wait_readable(ready.fileno(), _FORK_TIMEOUT_S) and ready.read(1)):
                    raise JailError("jail.start", "the jail ended before it was ready")  # noqa: TRY301
                with self._lock:
                    self._fork_into(jailed, limits, (request_fd, reply_fd, log_fd))
            except BaseException:
                jailed.kill()
                raise
        return jailed

    def close(self) -> None:
        """End the zygote; workers already started live on. May be repeated."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _fork_into(
        self, jailed: JailedProcess, limits: JailLimits, pipes: tuple[int, int, int]
    ) -> None:
        with contextlib.ExitStack() as stack:
            fds = _open_namespaces(jailed.init_pid, stack)
            message = json.dumps(
                {
                    "confinement": self._jail.confinement(limits).pack(),
                    "namespaces": len(fds),
                    "cgroup": "" if jailed.cgroup is None else str(jailed.cgroup.path),
                }
            )
            try:
                socket.send_fds(self._control, [message.encode()], [*fds, *pipes])
                answer = self._answer()
            except OSError as e:
                raise JailError("jail.zygote", f"{e}; {self._last_error()}") from e
        if answer != "ok":
            raise JailError("jail.zygote", answer or self._last_error())

    def _answer(self) -> str:
        timeout_s = _FORK_TIMEOUT_S if self._warm else _IMPORT_TIMEOUT_S
        if not wait_readable(self._control.fileno(), timeout_s):
            return f"no answer within {timeout_s:g} s"
        answer = self._control.recv(_MAX_MESSAGE_BYTES).decode()
        self._warm = True
        return answer

    def _last_error(self) -> str:
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", "replace").strip()
        return f"the zygote ended: {said[-1000:]}"


def _open_namespaces(init_pid: int | None, stack: contextlib.ExitStack) -> list[int]:
    """Namespace files of a jail's first process; its user namespace first when it has its own."""
    fds = []
    for name in _NAMESPACES:
        fd = os.open(f"/proc/{init_pid}/ns/{name}", os.O_RDONLY)
        stack.callback(os.close, fd)
        fds.append(fd)
    owner = fcntl.ioctl(fds[0], _NS_GET_USERNS)
    stack.callback(os.close, owner)
    own = Path("/proc/self/ns/user").stat()
    if os.fstat(owner).st_ino != own.st_ino:
        fds.insert(0, owner)
    return fds
