"""Runs a program and leaves nothing of it behind: `python -I -m nestling.inner.keeper COMMAND...`.

prime-rl and vLLM start servers, which start workers, and prime-rl's run a job's own code. On Linux this process adopts
whatever of that loses its parent (`PR_SET_CHILD_SUBREAPER`, prctl(2)), so sessions and double forks change nothing:
when the program ends, or when standard input closes because whoever asked for it ended, all descendants are killed
and reaped. The exit code is the program's; 128 + n for signal n.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from nestling.jobs.jail_confine import set_process_option

__all__ = ["main"]

_PARENT_FIELD: Final = 1
"""Of /proc/<pid>/stat after the command's closing bracket."""


def main() -> None:
    """Never returns."""
    if sys.platform == "linux":
        set_process_option("child_subreaper", 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asked decides when to stop
    signal.signal(signal.SIGTERM, lambda *_: _end(128 + signal.SIGTERM))
    program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)  # noqa: S603 (all it is for)
    threading.Thread(target=_until_input_closes, daemon=True).start()
    while True:
        pid, status = os.wait()  # adopted ones are reaped here as well
        if pid == program.pid:
            code = os.waitstatus_to_exitcode(status)
            _end(code if code >= 0 else 128 - code)


def _until_input_closes() -> None:
    while os.read(0, 4096):
        pass
    _end(128 + signal.SIGKILL)


def _end(code: int) -> None:
    """Kill again and again: what is being killed may be forking."""
    me = os.getpid()
    while below := set(_descendants(me)):
        for pid in below:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        threading.Event().wait(0.005)
    os._exit(code)


def _descendants(root: int) -> Iterator[int]:
    """Living ones; a zombie has nothing left to kill and is gone once reaped."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    parents[int(entry.name)] = int(fields[_PARENT_FIELD])
    for pid in parents:
        above: int | None = pid
        while above is not None and above != root:
            above = parents.get(above)
        if above == root and pid != root:
            yield pid


if __name__ == "__main__":
    main()
