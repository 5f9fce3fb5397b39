"""Run a Python program that is hostile by assumption.

bubblewrap gives it empty namespaces (network, processes, ipc, mounts, and users unless we are
root) and a read-only minimal system; the program's first lines, ours, set limits and drop what is
left of privileges. Started by root, the program becomes a user that owns nothing; started by
anybody else, it stays that user inside a user namespace.

Not defended: bugs of the kernel, timing and cache channels, and, where there is no writable
cgroup v2, the memory of many processes together (each is limited, and so is their number).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Final

from nestling.core.errors import ConfigError, JailError
from nestling.jobs.jail_cgroup import JailCgroup
from nestling.jobs.jail_confine import Confinement
from nestling.jobs.jail_runtime import JAIL_JOB_DIR, python_runtime
from nestling.jobs.jail_seccomp import seccomp_program

__all__ = [
    "WORKER_ENVIRONMENT",
    "Jail",
    "JailLimits",
    "JailedProcess",
    "require_bubblewrap",
    "wait_readable",
]

_MINIMUM_VERSION: Final = (0, 8)
"""First with `--size`, which caps the private /tmp."""
_START_TIMEOUT_S: Final = 20.0
_KILL_TIMEOUT_S: Final = 10.0
_END_TIMEOUT_S: Final = 2.0
_FIRST_UID: Final = 61184
_NUM_UIDS: Final = 4336
"""The range that systemd keeps for throw-away users."""
_counter = itertools.count(os.getpid())

WORKER_ENVIRONMENT: Final = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",  # noqa: S108 (inside the jail, private)
    "TMPDIR": "/tmp",  # noqa: S108
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

_BOOT: Final = """\
import sys
sys.path[len(sys.path):] = {sys_path!r}
from nestling.jobs.jail_confine import Confinement, confine
confine(Confinement.unpack({packed!r}), drop={drop!r})
from {module} import main
main(sys.argv[1:])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JailLimits:
    """What one job's environment may use, over its whole life unless said otherwise."""

    cpu_s: int = 900
    """Processor seconds of each process."""
    memory_bytes: int = 1024 * 1024 * 1024
    """Address space of each process; with a cgroup also the sum over all."""
    processes: int = 8
    """Processes and threads."""
    file_bytes: int = 16 * 1024 * 1024
    """Largest file."""
    tmp_bytes: int = 64 * 1024 * 1024
    """Private /tmp, in memory."""
    open_files: int = 64
    log_bytes: int = 4 * 1024 * 1024
    """Standard output and error together."""
    load_s: float = 60.0
    """Wall clock for starting and importing the package."""
    call_s: float = 30.0
    """Wall clock for one batch of rows, tool calls or scores."""
    life_s: float = 7200.0
    """Wall clock from start to end: quick answers to very many calls are a hang as well."""


@dataclass(slots=True, kw_only=True)
class JailedProcess:
    """A running program with everything it started."""

    process: subprocess.Popen[bytes]
    init_fd: int | None
    """A pidfd of the namespace's first process; its end is the end of the whole tree."""
    init_pid: int | None
    cgroup: JailCgroup | None
    _closed: bool = field(default=False, repr=False)

    def kill(self) -> None:
        """Kill the whole tree and wait until it is gone; may be repeated."""
        if self._closed:
            return
        self._closed = True
        if self.init_fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.init_fd, signal.SIGKILL)
            # readable once the first process has exited, which the kernel delays until every
            # other process of its pid namespace has been reaped
            wait_readable(self.init_fd, _KILL_TIMEOUT_S)
            os.close(self.init_fd)
        else:  # no jail: the process group is all there is to hold
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        try:  # bubblewrap reaps its child and ends by itself
            self.process.wait(timeout=_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=_KILL_TIMEOUT_S)
        if self.cgroup is not None:
            self.cgroup.remove()

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.poll()


class Jail:
    """Starts programs in a jail; cheap to make, holds nothing.

    A jail dies with the thread that started it (the kernel's parent-death signal), so start it
    from a thread that lives as long as the environment is used.

    `unsafe=True` runs them without bubblewrap, with limits only: for machines where the operator
    trusts the jobs. It is never chosen silently, and runs record it.

    Raises:
        ConfigError: bubblewrap is missing or too old.
    """

    def __init__(self, *, unsafe: bool = False) -> None:
        self.unsafe = unsafe
        self._bwrap = None if unsafe else require_bubblewrap()

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        job_dir: Path,
        limits: JailLimits,
        keep_fds: Sequence[int],
        log_fd: int,
    ) -> JailedProcess:
        """Start `module.main(arguments)` on the worker's minimal package.

        `job_dir` appears read-only as `/job`. `keep_fds` are the only descriptors it gets besides
        standard input (empty) and output and error (`log_fd`).

        Raises:
            JailError: `jail.start`, the jail could not be made.
        """
        runtime = python_runtime()
        confinement = self.confinement(limits)
        sys_path = (str(Path(__file__).parents[2]),) if self.unsafe else runtime.sys_path
        if self.unsafe:
            sys_path += runtime.sys_path[1:]
        boot = _BOOT.format(
            sys_path=list(sys_path), packed=confinement.pack(), drop=not self.unsafe, module=module
        )
        command = [runtime.python, "-P", "-s", "-S", "-B", "-c", boot, *arguments]
        if self.unsafe:
            return self._start_unjailed(command, job_dir, keep_fds, log_fd)
        return self.start_command(
            command, job_dir=job_dir, limits=limits, keep_fds=keep_fds, log_fd=log_fd
        )

    def start_command(
        self,
        command: Sequence[str],
        *,
        job_dir: Path,
        limits: JailLimits,
        keep_fds: Sequence[int],
        log_fd: int,
        stdin_fd: int = subprocess.DEVNULL,
    ) -> JailedProcess:
        """Start a command in fresh namespaces; limits on processor and memory are its own affair.

        Raises:
            JailError: `jail.start`, the jail could not be made.
        """
        if self._bwrap is None:
            raise JailError("jail.start", "start_command needs a jail; unsafe is set")
        options = self._options(job_dir, limits)
        cgroup = JailCgroup.create(memory_bytes=limits.memory_bytes, processes=limits.processes)
        with contextlib.ExitStack() as stack:
            filter_file = _memory_file(stack, seccomp_program())
            info_read, info_write = _pipe(stack)
            block_read, block_write = _pipe(stack)
            options += ["--seccomp", str(filter_file.fileno())]
            options += ["--info-fd", str(info_write.fileno())]
            options += ["--block-fd", str(block_read.fileno())]
            arguments = _memory_file(stack, "\0".join(options).encode())
            handed = (file.fileno() for file in (filter_file, info_write, block_read, arguments))
            process = subprocess.Popen(  # noqa: S603 (fixed program, options built above)
                [self._bwrap, "--args", str(arguments.fileno()), "--", *command],
                stdin=stdin_fd,
                stdout=log_fd,
                stderr=log_fd,
                env={},
                pass_fds=(*handed, *keep_fds),
                start_new_session=True,
            )
            info_write.close()  # so that its end is seen when bubblewrap gives up
            jailed = JailedProcess(process=process, init_fd=None, init_pid=None, cgroup=cgroup)
            try:
                init_pid = _read_child_pid(info_read.fileno())
                jailed.init_fd = os.pidfd_open(init_pid)
                jailed.init_pid = init_pid
                if cgroup is not None:
                    cgroup.add(init_pid)
                block_write.write(b"x")
            except (OSError, ValueError, KeyError) as e:
                jailed.kill()
                raise JailError("jail.start", f"bubblewrap did not start: {e}") from e
        return jailed

    def confinement(self, limits: JailLimits) -> Confinement:
        """The limits one process tree puts on itself, with a user of its own when we are root."""
        drop_to = None
        if os.geteuid() == 0 and not self.unsafe:
            drop_to = _FIRST_UID + next(_counter) % _NUM_UIDS
        return Confinement(
            cpu_s=limits.cpu_s,
            memory_bytes=limits.memory_bytes,
            processes=limits.processes,
            file_bytes=limits.file_bytes,
            open_files=limits.open_files,
            uid=drop_to,
        )

    def _options(self, job_dir: Path, limits: JailLimits) -> list[str]:
        options = [*_namespace_options(), "--hostname", "jail"]
        options += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        if os.geteuid() == 0:
            for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
                options += ["--cap-add", capability]  # `confine` needs them and gives them up
        options.append("--clearenv")
        for name, value in WORKER_ENVIRONMENT.items():
            options += ["--setenv", name, value]
        # before the libraries: an installation below /tmp is mounted over the private one
        options += ["--perms", "1777", "--size", str(limits.tmp_bytes), "--tmpfs", "/tmp"]  # noqa: S108
        options += python_runtime().options
        options += ["--ro-bind", str(job_dir), JAIL_JOB_DIR, "--proc", "/proc"]
        options += ["--chdir", JAIL_JOB_DIR, "--remount-ro", "/"]
        return options

    def _start_unjailed(
        self, command: list[str], job_dir: Path, keep_fds: Sequence[int], log_fd: int
    ) -> JailedProcess:
        process = subprocess.Popen(  # noqa: S603 (the operator asked for it)
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            env=dict(WORKER_ENVIRONMENT),
            cwd=job_dir,
            pass_fds=tuple(keep_fds),
            start_new_session=True,
        )
        return JailedProcess(process=process, init_fd=None, init_pid=None, cgroup=None)


@cache
def require_bubblewrap() -> str:
    """Path of a usable bubblewrap.

    Raises:
        ConfigError: it is missing, too old, or may not make namespaces here.
    """
    path = shutil.which("bwrap", path="/usr/bin:/usr/local/bin:/bin:" + os.environ.get("PATH", ""))
    if path is None:
        raise ConfigError(
            "bubblewrap (bwrap) is not installed; agent-written code runs only in its jail; fix: "
            "apt-get install bubblewrap, or dnf install bubblewrap, or pacman -S bubblewrap; "
            "--unsafe-no-jail runs jobs you trust without it"
        )
    said = subprocess.run(  # noqa: S603
        [path, "--version"], capture_output=True, text=True, check=False, timeout=10
    ).stdout
    version = tuple(int(part) for part in said.split()[-1].split(".")[:2]) if said else (0, 0)
    if version < _MINIMUM_VERSION:
        raise ConfigError(
            f"bubblewrap {said.strip() or 'unknown'} at {path}; expected 0.8 or newer, which can "
            "cap the private /tmp; fix: install a newer one"
        )
    trial = subprocess.run(  # noqa: S603
        [path, *_namespace_options(), "--ro-bind", "/", "/", "--proc", "/proc", "/bin/true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
    )
    if trial.returncode != 0:
        raise ConfigError(
            f"bubblewrap cannot make namespaces here: {trial.stderr.strip()}; expected a kernel "
            "that lets this user do so; fix: sysctl kernel.unprivileged_userns_clone=1 or "
            "kernel.apparmor_restrict_unprivileged_userns=0 on the host, or a container with "
            "CAP_SYS_ADMIN; --unsafe-no-jail runs jobs you trust without a jail"
        )
    return path


def wait_readable(fd: int, timeout_s: float) -> bool:
    """Whether `fd` has something to read, or is at its end, within the time."""
    poll = select.poll()  # unlike select, takes descriptors of any number
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _namespace_options() -> list[str]:
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    options.append("--unshare-cgroup-try")
    return options if os.geteuid() == 0 else [*options, "--unshare-user"]


def _read_child_pid(info_fd: int) -> int:
    """Wait for bubblewrap's report of the namespace's first process."""
    received = b""
    while not received.rstrip().endswith(b"}"):
        chunk = os.read(info_fd, 4096) if wait_readable(info_fd, _START_TIMEOUT_S) else b""
        if not chunk:
            raise ValueError("no report within the time limit, its message is in the log")
        received += chunk
    info: Mapping[str, object] = json.loads(received)
    return int(str(info["child-pid"]))


def _pipe(stack: contextlib.ExitStack) -> tuple[FileIO, FileIO]:
    read, write = os.pipe()
    return stack.enter_context(FileIO(read, "r")), stack.enter_context(FileIO(write, "w"))


def _memory_file(stack: contextlib.ExitStack, content: bytes) -> FileIO:
    file = stack.enter_context(FileIO(os.memfd_create("nestling"), "w"))
    file.write(content)
    file.seek(0)
    return file
