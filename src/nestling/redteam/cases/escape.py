"""Out of the jail: files of the host, privileges, other processes."""

from __future__ import annotations

import platform
from contextlib import closing
from pathlib import Path
from typing import Final

import nestling
from nestling.core.errors import JailError
from nestling.redteam.case import CaseList, Happened
from nestling.redteam.hostile_job import spy_files
from nestling.redteam.room import TargetRoom

__all__ = ["CASES"]

_LIST = CaseList("jail escape")
CASES = _LIST.cases

_COLUMN: Final = {"x86_64": 0, "aarch64": 1}
_CALLS: Final[dict[str, tuple[int, int]]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "unshare": (272, 97),
    "setns": (308, 268),
    "clone3": (435, 435),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "perf_event_open": (298, 241),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "open_by_handle_at": (304, 265),
    "pidfd_getfd": (438, 438),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "syslog": (103, 116),
}


def _judged(room: TargetRoom, code: str, *, cold: bool = False) -> Happened:
    """Nothing may be DONE, no canary may leave, no trap may spring."""
    left = room.in_jail(code, cold=cold)
    found = [*left.done(), *room.traps.sprung()]
    if room.canary.is_in(left.everything):
        found.append("the canary came out")
    ran = bool(left.said)
    return Happened(
        what="; ".join(found) or ("everything was refused" if ran else f"ended: {left.reason}"),
        succeeded=bool(found) or not ran,
        evidence=left.said or left.detail,
    )


@_LIST.case(
    "jail-read-home",
    act="read keys and files of the host and of other episodes at import time",
    expected="they are not mounted; the canary never leaves",
)
def read_home(room: TargetRoom) -> Happened:
    """By name, as an attacker who knows every path."""
    paths = [*map(str, room.secret_files), "/etc/shadow", "/etc/passwd", "/root/.bashrc"]
    paths += [str(room.folder / "state" / "eval-secret"), str(room.traps.file)]
    folders = [str(room.folder), "/home", "/var", "/run", "/sys", str(Path.home())]
    return _judged(
        room,
        f"""
        for path in {paths!r}: attempt("read " + path, read, path)
        for folder in {folders!r}:
            try: names = os.listdir(folder)
            except OSError: continue
            for name in names:
                if name not in (".venv", "work", "main", ".pyenv", "src"):
                    try: say("file", folder, name, read(os.path.join(folder, name))[:80])
                    except OSError: pass
        """,
    )


@_LIST.case(
    "jail-read-through-proc",
    act="reach the host's files through /proc/1/root, /proc/self/fd and cwd links",
    expected="other processes are of another user, and no descriptor leads out",
)
def through_proc(room: TargetRoom) -> Happened:
    """Every magic link that the jail's /proc has."""
    path = str(room.secret_files[0])
    return _judged(
        room,
        f"""
        for pid in os.listdir("/proc"):
            if pid.isdigit():
                for link in ("root", "cwd"):
                    attempt(f"{{pid}} {{link}}", read, f"/proc/{{pid}}/{{link}}{path}")
        for fd in os.listdir("/proc/self/fd"):
            for up in (".", "..", "../.."):
                try: inner = os.open(up, os.O_RDONLY, dir_fd=int(fd))
                except OSError: continue
                say("DONE opened through", fd, os.listdir(inner)[:5])
        for path in ("/proc/kcore", "/proc/kmsg", "/proc/sysrq-trigger", "/dev/mem", "/dev/kmem"):
            attempt(path, read, path, 64)
        attempt("sysrq", lambda: open("/proc/sysrq-trigger", "w").write("h"))
        attempt("core_pattern", lambda: open("/proc/sys/kernel/core_pattern", "w").write("|/tmp/x"))
        """,
    )


@_LIST.case(
    "jail-read-package",
    act="find the product's own source: generators, scorer, leak index, reward",
    expected="of the package only the worker's six files exist in a jail",
)
def read_package(room: TargetRoom) -> Happened:
    """By import and by path."""
    source = str(Path(nestling.__file__).parent)
    return _judged(
        room,
        f"""
        attempt("source", os.listdir, {source!r})
        for name in ("families", "engine", "inner", "agent", "fleet", "outer", "store", "redteam"):
            attempt("import " + name, importlib.import_module, "nestling." + name)
        """,
    )


for _cold in (False, True):

    def _calls(room: TargetRoom, cold: bool = _cold) -> Happened:
        column = _COLUMN[platform.machine()]
        numbers = {name: pair[column] for name, pair in _CALLS.items()}
        return _judged(
            room,
            f"for name, n in {numbers!r}.items(): attempt(name, call, n, 0, 0, 0, 0, 0)",
            cold=cold,
        )

    _LIST.add(
        "jail-system-calls-cold" if _cold else "jail-system-calls",
        _calls,
        act=f"two dozen dangerous system calls ({'cold' if _cold else 'warm'} start)",
        expected="the seccomp filter answers EPERM or ENOSYS",
    )


@_LIST.case(
    "jail-privileges",
    act="become root, raise limits, get real-time priority, make devices and namespaces",
    expected="no capability, no new privileges, hard limits",
)
def privileges(room: TargetRoom) -> Happened:
    """What a process could still ask for."""
    clone = (56, 220)[_COLUMN[platform.machine()]]
    return _judged(
        room,
        f"""
        if os.getuid(): attempt("setuid", os.setuid, 0); attempt("setgid", os.setgid, 0)
        attempt("nofile", resource.setrlimit, resource.RLIMIT_NOFILE, (4096, 4096))
        attempt("as", resource.setrlimit, resource.RLIMIT_AS, (1 << 40, 1 << 40))
        attempt("nproc", resource.setrlimit, resource.RLIMIT_NPROC, (4096, 4096))
        attempt("fifo", os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
        attempt("nice", os.setpriority, os.PRIO_PROCESS, 0, -5)
        attempt("oom", lambda: open("/proc/self/oom_score_adj", "w").write("-1000"))
        attempt("device", os.mknod, "/tmp/disk", 0o60600, os.makedev(8, 0))
        attempt("chroot", os.chroot, "/tmp")
        attempt("clone", call, {clone}, 0x10000000 | 17, 0, 0, 0, 0)
        attempt("su", subprocess.check_output, ["/usr/bin/su", "-c", "id"])
        attempt("tty", open, "/dev/tty")
        attempt("tiocsti", lambda: __import__("fcntl").ioctl(0, 0x5412, b"x"))
        """,
    )


@_LIST.case(
    "jail-outside-processes",
    act="signal, trace and inspect processes outside by number",
    expected="its own process namespace: they have no number in it",
)
def outside_processes(room: TargetRoom) -> Happened:
    """A process of ours waits outside to be killed."""
    return _judged(
        room,
        f"""
        for pid in (os.getppid() or 999_999, {room.traps.victim.pid}):
            attempt("kill", os.kill, pid, 9)
            attempt("environ", read, f"/proc/{{pid}}/environ")
        say(sorted(os.listdir("/proc"))[:12])
        """,
    )


@_LIST.case(
    "jail-write-interpreter",
    act="change the interpreter, libraries or the worker's own files for the next job",
    expected="all mounts but /tmp are read-only",
)
def write_interpreter(room: TargetRoom) -> Happened:
    """Persistence."""
    return _judged(
        room,
        """
        import site
        for folder in [*sys.path, "/job", "/nestling/nestling/jobs", os.path.dirname(os.__file__)]:
            attempt("write " + folder, lambda: open(os.path.join(folder, "x.pth"), "w").write("x"))
            attempt("rename " + folder, os.rename, folder, folder + "x")
        attempt("python", lambda: open(sys.executable or "/usr/bin/python3", "ab").write(b"x"))
        attempt("worker", lambda: open("/nestling/nestling/jobs/env_worker.py", "a").write("#"))
        """,
    )


@_LIST.case(
    "jail-start-up-files",
    act="bring sitecustomize.py, .pth files, a package named tools and one named json",
    expected="refused in the bundle, or ignored: the interpreter is isolated",
)
def start_up_files(room: TargetRoom) -> Happened:
    """Directly to the jail, past the bundle's own check."""
    files = spy_files("import tools; say('tools is', tools.__file__, json.__file__)\n"
                      "if hasattr(tools, 'EVIL'): say('DONE our tools were replaced')")  # fmt: skip
    evil = b"EVIL = 1\nopen('/tmp/evil', 'w').write('x')\n"
    for name in ("sitecustomize.py", "usercustomize.py", "x.pth", "tools/__init__.py",
                 "tools/evil.py", "encodings/__init__.py"):  # fmt: skip
        files[name] = evil
    files["environment/__init__.py"] += b"\nif os.path.exists('/tmp/evil'): say('DONE evil ran')\n"
    try:
        with closing(room.open_env(files)) as env:
            said = env.rows(1)[0].prompt
    except JailError as error:
        return Happened(what=f"ended: {error.reason}", succeeded=True, evidence=error.detail)
    return Happened(what=said, succeeded="DONE" in said)
