"""The system calls a jailed process may not make, as a classic BPF program.

A deny list: Python and its libraries need too many calls for a short allow list, and the
namespaces already bound what the rest can reach. Denied calls fail with EPERM (`clone3` with
ENOSYS, so that the C library falls back to `clone`, whose flags can be filtered); a foreign
instruction set kills the process. Numbers are from the kernel's `unistd.h` of each machine.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from typing import Final

from nestling.core.errors import ConfigError

__all__ = ["seccomp_program"]

_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_AT_LEAST: Final = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_JUMP_ANY_BIT: Final = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN: Final = 0x06

_ALLOW: Final = 0x7FFF0000
_KILL_PROCESS: Final = 0x80000000
_ERRNO: Final = 0x00050000

_OFFSET_NUMBER: Final = 0
_OFFSET_ARCH: Final = 4
_OFFSET_ARG0: Final = 16  # low half, little endian
_OFFSET_ARG1: Final = 24

_NAMESPACE_FLAGS: Final = 0x7E020080
"""CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET,TIME}."""

_TIOCSTI: Final = 0x5412
_TIOCLINUX: Final = 0x541C

_ARCHES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name: (x86_64, aarch64); None where the machine has no such call
_DENIED: Final[dict[str, tuple[int | None, int | None]]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "unshare": (272, 97),
    "setns": (308, 268),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "perf_event_open": (298, 241),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "memfd_secret": (447, 447),
    "memfd_create": (319, 279),  # no limit of a process counts what such files hold
    "shmget": (29, 194),  # nor what detached segments hold
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "uselib": (134, None),
    "vhangup": (153, 58),
    "nfsservctl": (180, 42),
}

_SOCKET: Final = ((41, 53), (198, 199))
"""socket and socketpair per machine."""
_CLONE: Final = (56, 220)
_CLONE3: Final = 435
_IOCTL: Final = (16, 29)


def seccomp_program(machine: str | None = None) -> bytes:
    """The filter as an array of `struct sock_filter`, for `machine` (default: this one).

    Raises:
        ConfigError: no table for the machine.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHES:
        raise ConfigError(
            f"no system call table for {machine}; expected one of {', '.join(_ARCHES)}; "
            "fix: run agent jobs on such a machine"
        )
    column = list(_ARCHES).index(machine)
    deny = _instruction(_RETURN, _ERRNO | errno.EPERM)
    allow = _instruction(_RETURN, _ALLOW)
    program = [
        _instruction(_LOAD, _OFFSET_ARCH),
        _instruction(_JUMP_EQUAL, _ARCHES[machine], 1, 0),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":  # the x32 table would be a way around every number below
        program += [_instruction(_JUMP_AT_LEAST, 0x40000000, 0, 1), deny]
    program += [
        _instruction(_JUMP_EQUAL, _CLONE3, 0, 1),
        _instruction(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            program += [_instruction(_JUMP_EQUAL, number, 0, 1), deny]
    for number in _SOCKET[column]:
        program += [
            _instruction(_JUMP_EQUAL, number, 0, 4),
            _instruction(_LOAD, _OFFSET_ARG0),
            _instruction(_JUMP_EQUAL, socket.AF_UNIX.value, 0, 1),
            allow,
            deny,
        ]
    program += [
        _instruction(_JUMP_EQUAL, _CLONE[column], 0, 4),
        _instruction(_LOAD, _OFFSET_ARG0),
        _instruction(_JUMP_ANY_BIT, _NAMESPACE_FLAGS, 0, 1),
        deny,
        allow,
        _instruction(_JUMP_EQUAL, _IOCTL[column], 0, 5),
        _instruction(_LOAD, _OFFSET_ARG1),
        _instruction(_JUMP_EQUAL, _TIOCSTI, 1, 0),
        _instruction(_JUMP_EQUAL, _TIOCLINUX, 0, 1),
        deny,
        allow,
        allow,
    ]
    return b"".join(program)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
