"""Workers of `bench spread`, each in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest


@pytest.mark.long
def test_sigterm_while_the_worker_closes_its_room_ends_it_without_a_traceback() -> None:
    code = """
        import atexit, os, signal, sys
        from nestling.bench.spread import close_room

        class ToldToEnd:
            def close(self):
                print("closing", flush=True)
                os.kill(os.getpid(), signal.SIGTERM)

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        atexit.register(close_room, ToldToEnd())
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "closing\n", "")
