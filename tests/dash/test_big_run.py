"""A run of 54 steps of 40 jobs, written through the store's own methods."""

import json
import subprocess
import sys

import pytest

from nestling.agent.episode_result import EpisodeResult
from nestling.store import RunStore
from nestling.store.jobs import LeaseRecord, NewJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, GROUPS, MEMBERS = 54, 10, 4
LIMIT_MIB = 200

_LOOK = """
import asyncio, json, sys, time
from pathlib import Path
from nestling.dash.server import DashConfig, listening

async def main():
    import urllib.request
    times = {}
    started = time.process_time()
    async with listening(Path(sys.argv[1]), DashConfig(port=0)) as server:
        def read(path):
            with urllib.request.urlopen(server.address + path) as answer:
                return answer.read()
        views = ("", "/steps", "/steps/20", "/episodes", "/episodes?sort=reward&q=ledger",
                 "/episodes/train/000123/001", "/fleet", "/held-out", "/alerts")
        for number, view in enumerate(views * 3):
            before = time.process_time()
            page = await asyncio.to_thread(read, "runs/big" + view)
            assert b"</html>" in page
            name = view or "/"
            times.setdefault("first" if number == 0 else name, time.process_time() - before)
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"peak_mib": peak / 1024, "cpu_s": times}))

asyncio.run(main())
"""


def _queue_jobs(store: RunStore) -> int:
    """One finished job per episode, as a fleet would leave it."""
    count = 0
    with store.transaction():
        for group in store.progress.groups(purpose="train"):
            for record in store.episodes.all(group_id=group.id, state="finished"):
                outcome = EpisodeResult.model_validate(record.summary["result"]).outcome
                if outcome is None:
                    continue
                job_id = f"run-{record.id}"
                payload = {"family": record.family, "job_hash": f"{count:064x}"}
                store.jobs.insert(
                    NewJob(
                        id=job_id,
                        kind="run",
                        payload=payload,
                        family=record.family,
                        episode_id=record.id,
                        group_key=group.id,
                    )
                )
                lease = LeaseRecord(
                    job_id=job_id,
                    token=job_id,
                    worker=f"cpu-{count % 16}",
                    session="s",
                    acquired_at=0.0,
                    heartbeat_at=0.0,
                    acquired_mono_s=0.0,
                    expires_mono_s=1.0,
                    stage=None,
                )
                store.jobs.start(store.jobs.get(job_id), lease)
                store.jobs.finish(store.jobs.get(job_id), outcome.model_dump(mode="json"))
                count += 1
    return count


def test_big_run_stays_small_in_memory(make_run, tmp_path, capsys):
    words = "what the agent wrote, line by line\n" * 60
    folder = make_run(tmp_path / "big", steps=STEPS, groups=GROUPS, text=words)
    with RunStore(folder / "run.db") as store:
        assert len(store.episodes.all(state="finished")) >= STEPS * GROUPS * MEMBERS
        assert _queue_jobs(store) > 0.8 * STEPS * GROUPS * MEMBERS
    done = subprocess.run(
        [sys.executable, "-c", _LOOK, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    with capsys.disabled():
        size = (folder / "run.db").stat().st_size / 2**20
        print(f"\nrun.db {size:.0f} MiB, peak {found['peak_mib']:.0f} MiB, CPU s {found['cpu_s']}")
    assert found["peak_mib"] < LIMIT_MIB
