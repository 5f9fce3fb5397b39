import subprocess
import sys

from nestling.inner.cpu_time import CpuMeter

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"


def test_ended_and_living_children_and_grandchildren_count() -> None:
    meter = CpuMeter()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    ended_s = meter.elapsed_s()
    assert 0.25 < ended_s < 1.0
    nested = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\n"
    alive = subprocess.Popen(
        [sys.executable, "-c", nested + "print('done', flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with alive:
        assert alive.stdout is not None
        alive.stdout.readline()
        assert 0.25 < meter.elapsed_s() - ended_s < 1.0
        alive.communicate(b"\n")
