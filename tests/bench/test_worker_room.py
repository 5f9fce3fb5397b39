"""Worker processes of benchmarks end with their room closed."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.long


def ended(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    script = f"""
        import atexit, os, signal
        from nestling.bench.room import open_worker_room
        from nestling.config import RunConfig
        from nestling.wiring.rooms import Room

        def be_told_to_end():
            os.kill(os.getpid(), signal.SIGTERM)

        def close(self, really=Room.close):
            really(self)
            print("closed", flush=True)

        Room.close = close
        open_worker_room(RunConfig(), {str(tmp_path)!r}, ())
        """
    code = textwrap.dedent(script) + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False
    )


def test_sigterm_closes_what_is_open(tmp_path: Path) -> None:
    done = ended(tmp_path, "be_told_to_end()")
    assert (done.returncode, done.stdout, done.stderr) == (143, "closed\n", "")


def test_sigterm_while_the_worker_leaves_ends_it_without_a_traceback(tmp_path: Path) -> None:
    body = """
        Room.close = lambda self: (close(self), be_told_to_end())
        """
    done = ended(tmp_path, body)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "closed\n", "")
