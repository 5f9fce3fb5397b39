"""Sixteen hostile jobs beside four honest ones: the honest ones must not notice but for the wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from nestling.core.errors import JailError
from nestling.families.public_package import public_files
from nestling.jobs.env_client import open_env
from nestling.jobs.env_zygote import Zygote
from nestling.jobs.jail import Jail, JailLimits
from nestling.jobs.rollout_env import FinalRequest
from nestling.redteam.hostile_job import FAMILY, spy_files

LIMITS = JailLimits(
    cpu_s=20,
    memory_bytes=512 << 20,
    processes=6,
    tmp_bytes=16 << 20,
    file_bytes=8 << 20,
    log_bytes=1 << 20,
    load_s=60.0,
    call_s=8.0,
    life_s=60.0,
)
ACTS = {
    "fork bomb": "while True:\n    try: os.fork()\n    except OSError: pass",
    "memory bomb": "kept = []\nwhile True:\n    try: kept.append(bytearray(4 << 20))\n"
    "    except MemoryError: kept.clear()",
    "disk fill": "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nwhile True:\n"
    "    for n in range(8):\n        try:\n            with open(f'/tmp/{n}', 'wb') as f: f.write(bytes(4 << 20))\n"
    "        except OSError: pass",
    "infinite loop": "while True: pass",
    "huge output": "while True: os.write(1, b'x' * 65536)",
    "zombie spawner": "while True:\n    try:\n        if os.fork() == 0: os._exit(0)\n    except OSError: time.sleep(0.01)",
}  # fmt: skip
GENTLE = """
within = (resource.getrlimit(resource.RLIMIT_NPROC)[1] <= 6
          and resource.getrlimit(resource.RLIMIT_AS)[1] <= 512 << 20
          and resource.getrlimit(resource.RLIMIT_CPU)[1] <= 20
          and os.statvfs("/tmp").f_blocks * 4096 <= 16 << 20)
say("within" if within else "beyond")
"""


def hostile(number: int, act: str, jail: Jail, zygote: Zygote, stop: threading.Event, ends: list):
    files = spy_files(GENTLE, on_score=act)
    while not stop.is_set():
        with (
            suppress(JailError),
            closing(
                open_env(files, public_files(FAMILY), LIMITS, jail=jail, starter=zygote)
            ) as env,
        ):
            assert env.rows(1)[0].prompt == "within"
            (start,) = env.reset([0])
            env.score([FinalRequest(rollout_id=start.rollout_id, text="x", stop="done")])
        ends.append(number)


def honest(state: Path, work: Path) -> list[dict]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("honest_jobs.py")), str(state), str(work)],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_honest_jobs_are_the_same_beside_sixteen_hostile_ones(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    quiet = honest(state, tmp_path / "quiet")
    jail, stop, ends = Jail(), threading.Event(), []
    with Zygote(jail) as zygote:
        acts = [list(ACTS.values())[n % len(ACTS)] for n in range(16)]
        threads = [
            threading.Thread(target=hostile, args=(n, act, jail, zygote, stop, ends))
            for n, act in enumerate(acts)
        ]
        for thread in threads:
            thread.start()
        try:
            noisy = honest(state, tmp_path / "noisy")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    measured = ("cpu_s", "wall_s")
    for calm, stormy in zip(quiet, noisy, strict=True):
        same = {key: value for key, value in calm.items() if key not in measured}
        assert same == {key: value for key, value in stormy.items() if key not in measured}
    sums = {key: [sum(one[key] for one in run) for run in (quiet, noisy)] for key in measured}
    children = psutil.Process().children(recursive=True)
    print(
        f"\n16 hostile jobs beside 4 honest ones: results equal bit for bit; processor time "
        f"{sums['cpu_s'][0]:.2f} s quiet, {sums['cpu_s'][1]:.2f} s beside them, ratio "
        f"{sums['cpu_s'][1] / sums['cpu_s'][0]:.3f}; wall clock "
        f"{sums['wall_s'][0]:.1f} and {sums['wall_s'][1]:.1f} s; {len(ends)} hostile lives ended"
    )
    assert len(ends) >= 16
    assert [child.name() for child in children if child.is_running()] == []
