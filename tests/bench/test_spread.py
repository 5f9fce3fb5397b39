"""Workers of `bench spread`, each in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest


def ended(body: str) -> subprocess.CompletedProcess[str]:
    script = """
        import atexit, os, signal
        from nestling.bench.spread import closing_on_sigterm

        def be_told_to_end():
            os.kill(os.getpid(), signal.SIGTERM)
    """
    code = textwrap.dedent(script) + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False
    )


@pytest.mark.long
def test_sigterm_closes_what_is_open() -> None:
    done = ended(
        """
        with closing_on_sigterm():
            try:
                be_told_to_end()
            finally:
                print("closed")
        """
    )
    assert (done.returncode, done.stdout) == (143, "closed\n")


@pytest.mark.long
def test_sigterm_while_the_worker_leaves_ends_it_without_a_traceback() -> None:
    done = ended(
        """
        atexit.register(be_told_to_end)
        with closing_on_sigterm():
            pass
        """
    )
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
