"""What a process does to itself before it may run agent code: limits, identity, no privileges.

Used on both ways in: the cold worker calls `confine` in its first lines (bubblewrap has made the
namespaces and loaded the filter), the zygote's child calls `enter_namespaces`, `confine` and
`load_filter`. Standard library only; this file is bound into the jail.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = [
    "Confinement",
    "confine",
    "enter_namespaces",
    "limit_tmp_files",
    "load_filter",
    "set_process_option",
]

_MS_NOSUID: Final = 2
_MS_NODEV: Final = 4
_MS_REMOUNT: Final = 32
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_SECCOMP: Final = 22
_PR_CAPBSET_DROP: Final = 24
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_SECCOMP_MODE_FILTER: Final = 2
_CAPABILITY_VERSION_3: Final = 0x20080522
_MAX_CAPABILITIES: Final = 64
_NICENESS: Final = 19
"""The least share there is, about a seventieth of an ordinary one."""

_OPTIONS: Final = {
    "parent_death_signal": _PR_SET_PDEATHSIG,
    "child_subreaper": _PR_SET_CHILD_SUBREAPER,
    "no_new_privileges": _PR_SET_NO_NEW_PRIVS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """Limits of one process tree; the same values for every process in it."""

    cpu_s: int
    """Processor time of each process."""
    memory_bytes: int
    """Address space of each process."""
    processes: int
    """Processes and threads of the user in the jail."""
    file_bytes: int
    open_files: int
    uid: int | None
    """Become this user and group; None to stay who one is in the user namespace."""

    def pack(self) -> str:
        """As one command-line word."""
        values = (self.cpu_s, self.memory_bytes, self.processes, self.file_bytes, self.open_files)
        return ",".join(str(value) for value in (*values, -1 if self.uid is None else self.uid))

    @classmethod
    def unpack(cls, packed: str) -> Confinement:
        """The inverse of `pack`."""
        cpu_s, memory_bytes, processes, file_bytes, open_files, uid = map(int, packed.split(","))
        return cls(
            cpu_s=cpu_s,
            memory_bytes=memory_bytes,
            processes=processes,
            file_bytes=file_bytes,
            open_files=open_files,
            uid=None if uid < 0 else uid,
        )


def confine(confinement: Confinement, *, drop: bool = True) -> None:
    """Set hard limits and give up every privilege, for good.

    `drop=False` sets limits only (runs without a jail).

    Raises:
        OSError: the system refused; nothing untrusted may run then.
        PermissionError: privileges are left although every call succeeded.
    """
    limits = {
        resource.RLIMIT_CPU: confinement.cpu_s,
        resource.RLIMIT_AS: confinement.memory_bytes,
        resource.RLIMIT_FSIZE: confinement.file_bytes,
        resource.RLIMIT_NOFILE: confinement.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if drop:
        limits[resource.RLIMIT_NPROC] = confinement.processes
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))
    with contextlib.suppress(OSError):  # when memory runs out, this tree goes first
        Path("/proc/self/oom_score_adj").write_text("1000")
    _stand_back()
    if not drop:
        return
    set_process_option("no_new_privileges", 1)
    _drop_capabilities(bounding=True)
    if confinement.uid is not None:
        os.setgroups([])
        os.setresgid(confinement.uid, confinement.uid, confinement.uid)
        os.setresuid(confinement.uid, confinement.uid, confinement.uid)
    _clear_capabilities()
    _check_unprivileged()


def enter_namespaces(namespace_fds: Sequence[int]) -> None:
    """Join namespaces given as open `/proc/PID/ns/*` files, in order.

    The user namespace, if any, comes first; children land in the pid namespace, not the caller.

    Raises:
        OSError: the system refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for fd in namespace_fds:
        _check(libc.setns(fd, 0), "setns")


def limit_tmp_files(count: int) -> None:
    """Cap the number of files in the private /tmp: empty ones cost kernel memory, not its size.

    Needs the privileges that `confine` gives up.

    Raises:
        OSError: the system refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    flags = ctypes.c_ulong(_MS_REMOUNT | _MS_NOSUID | _MS_NODEV)
    options = f"nr_inodes={count}".encode()
    _check(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", flags, options), "limit files of /tmp")


def load_filter(program: bytes) -> None:
    """Install a seccomp filter for this process and all it starts; needs no_new_privs.

    Raises:
        OSError: the system refused.
    """
    buffer = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    fprog = Program(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(fprog), ctypes.c_ulong(0), 0
    )
    _check(result, "seccomp")


def set_process_option(name: str, value: int) -> None:
    """Set one of parent_death_signal, child_subreaper, no_new_privileges.

    Raises:
        OSError: the system refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    _check(libc.prctl(_OPTIONS[name], ctypes.c_ulong(value), zero, zero, zero), name)


def _stand_back() -> None:
    """Let trusted processes go first where there are not enough processors for all.

    A session has its own share where the kernel groups by session (sched(7), autogroup); elsewhere the process
    has. Both are asked for, neither is needed.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICENESS))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)


def _drop_capabilities(*, bounding: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    clear = ctypes.c_ulong(_PR_CAP_AMBIENT_CLEAR_ALL)
    _check(libc.prctl(_PR_CAP_AMBIENT, clear, zero, zero, zero), "ambient capabilities")
    if bounding:
        for capability in range(_MAX_CAPABILITIES):
            # without CAP_SETPCAP this fails, and no_new_privs makes the set useless anyway
            libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), zero, zero, zero)


def _clear_capabilities() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    _check(libc.capset(ctypes.byref(header), ctypes.byref(data)), "capset")


def _check_unprivileged() -> None:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    held = [name for name in ("CapInh", "CapPrm", "CapEff", "CapAmb") if int(fields[name], 16)]
    if held or int(fields["NoNewPrivs"]) != 1:
        raise PermissionError(f"privileges left: {held or 'no_new_privs is off'}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
