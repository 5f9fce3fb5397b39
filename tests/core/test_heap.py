"""Freed memory really goes back."""

import subprocess
import sys

_WORK = """
import psutil
from nestling.core.heap import trim_heap
kept = [bytearray(60_000) for _ in range(3000)]  # below the size that is mapped on its own
last = kept[-1]
del kept
before = psutil.Process().memory_info().rss
trim_heap()
print(before - psutil.Process().memory_info().rss, len(last))
"""


def test_freed_blocks_below_a_living_one_are_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WORK], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout.split()[0]) > 100_000_000
