"""The zygote's own process: forks a worker into a jail on request, and nothing else.

See `env_zygote` for the other side. Only this process and its children import verifiers.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import signal
import socket
import sys
import traceback
from io import FileIO
from pathlib import Path
from typing import Final, NoReturn

from nestling.jobs.env_worker import serve
from nestling.jobs.jail import WORKER_ENVIRONMENT
from nestling.jobs.jail_confine import (
    Confinement,
    confine,
    enter_namespaces,
    limit_tmp_files,
    load_filter,
    set_process_option,
)
from nestling.jobs.jail_runtime import JAIL_JOB_DIR, WORKER_FILES
from nestling.jobs.jail_seccomp import seccomp_program

__all__ = ["run_zygote"]

_MAX_MESSAGE_BYTES: Final = 4096
_MAX_FDS: Final = 16
_TMP_FILES: Final = 4096


def run_zygote(control_fd: int) -> None:
    """Serve fork requests until the other end closes; the whole life of the zygote."""
    control = socket.socket(fileno=control_fd)
    set_process_option("child_subreaper", 1)
    program = seccomp_program()
    gc.collect()
    gc.freeze()  # keeps the collector of children from copying every page
    # at once: a jail is gone only when its worker, our child by adoption, has been reaped
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    while True:
        message, fds, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, _MAX_FDS)
        if not message:
            return
        request = json.loads(message)
        try:
            answer = _fork_worker(request, fds, program)
        finally:
            for fd in fds:
                os.close(fd)
        control.send(answer.encode()[:_MAX_MESSAGE_BYTES])


def _fork_worker(request: dict[str, object], fds: list[int], program: bytes) -> str:
    """Fork twice: the first child joins the namespaces, the second is in all of them."""
    count = int(str(request["namespaces"]))
    confinement = Confinement.unpack(str(request["confinement"]))
    read, write = os.pipe()
    go_between = os.fork()
    if go_between == 0:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(read)
            if request["cgroup"]:
                (Path(str(request["cgroup"])) / "cgroup.procs").write_text("0")
            enter_namespaces(fds[:count])
            if os.fork() == 0:
                _become_worker(fds[count:], confinement, program)
            os.write(write, b"ok")
        except BaseException as e:  # noqa: BLE001 (reported, and the process ends)
            os.write(write, f"{type(e).__name__}: {e}".encode()[:_MAX_MESSAGE_BYTES])
        finally:
            os._exit(0)
    os.close(write)
    with FileIO(read) as answer:  # ends when the go-between does: the worker closed its copy
        said = answer.read().decode()
    return said or "the process between zygote and worker died"


def _become_worker(pipes: list[int], confinement: Confinement, program: bytes) -> NoReturn:
    """In the jail: keep nothing but three descriptors, then serve and die."""
    try:
        request_fd, reply_fd = _keep_only(pipes)
        os.setsid()
        os.chdir(JAIL_JOB_DIR)
        _forget_ourselves()
        limit_tmp_files(_TMP_FILES)
        confine(confinement)
        load_filter(program)
        serve(request_fd, reply_fd, Path(JAIL_JOB_DIR))
    except BaseException:  # noqa: BLE001 (nothing above may run on)
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(0)


def _keep_only(pipes: list[int]) -> tuple[int, int]:
    """Standard streams to nothing and the log, requests on 3, replies on 4, all else closed."""
    null = os.open(os.devnull, os.O_RDONLY)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (null, pipes[2], pipes[2], *pipes[:2])]
    for target, fd in enumerate(high):
        os.dup2(fd, target, inheritable=target < 3)
    os.closerange(len(high), os.sysconf("SC_OPEN_MAX"))
    return 3, 4


def _forget_ourselves() -> None:
    """What a cold worker would not have: our modules, paths and arguments."""
    os.environ.clear()
    os.environ.update(WORKER_ENVIRONMENT)
    sys.argv[:] = ["env"]
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parents[2])]
    sys.path_importer_cache.clear()
    kept = {"nestling." + file.removesuffix(".py").replace("/", ".") for file in WORKER_FILES}
    kept |= {"nestling", "nestling.core", "nestling.jobs"}
    for name in [name for name in sys.modules if name.partition(".")[0] == "nestling"]:
        if name not in kept:
            del sys.modules[name]


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
