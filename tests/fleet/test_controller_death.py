"""The controller itself is killed: no orphan stays, no job is lost, none is counted twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nestling.core.clock import SystemClock
from nestling.fleet.process_tree import start_ticks
from nestling.fleet.providers.local import LocalProvider, LocalWorkers
from nestling.store import GroupCommit, RunStore

_CONTROLLER = """
import asyncio, sys
from pathlib import Path
from nestling.core.clock import SystemClock
from nestling.fleet.pool import Pool
from nestling.fleet.providers.local import LocalProvider, LocalWorkers
from nestling.fleet.queue import JobQueue
from nestling.store import GroupCommit, RunStore
from nestling.store.jobs import NewJob
folder, session, handlers = Path(sys.argv[1]), sys.argv[2], sys.argv[3]

async def main():
    clock = SystemClock()
    with RunStore(folder / "run.db") as store, GroupCommit(store) as writer:
        queue = JobQueue(store, clock=clock, session=session)
        workers = LocalWorkers(handlers="fleet_handlers:make_handlers", logs=folder / "logs",
                               environment={"PYTHONPATH": handlers}, beat_s=0.1)
        provider = LocalProvider(workers, writer)
        queue.recover()
        await provider.sweep()
        for number in range(12):
            queue.enqueue(NewJob(id=f"j{number}", kind="nap", payload={"n": number},
                                 reuse_key=f"k{number}", max_tries=50))
        pool = Pool(queue=queue, writer=writer, provider=provider, size=2, clock=clock)
        print("running", flush=True)
        async with asyncio.TaskGroup() as group:
            group.create_task(pool.run())
            while store.jobs.counts()["done"] < 12:
                await asyncio.sleep(0.02)
            pool.stop()
        await provider.close()

asyncio.run(main())
"""


def start(folder: Path, session: str) -> subprocess.Popen[str]:
    here = str(Path(__file__).parent)
    return subprocess.Popen(
        [sys.executable, "-c", _CONTROLLER, str(folder), session, here],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
async def test_killed_controller_is_resumed_until_all_is_done(tmp_path: Path, until) -> None:
    pids: set[int] = set()
    for number in range(2):
        controller = start(tmp_path, f"s{number}")
        assert controller.stdout is not None
        assert controller.stdout.readline() == "running\n"
        with RunStore.open_reader(tmp_path / "run.db") as store:
            done = store.jobs.counts()["done"]
            await until(lambda store=store, done=done: store.jobs.counts()["done"] > done)
            pids |= {record.pid for record in store.processes.all()}
        controller.send_signal(signal.SIGKILL)
        controller.wait()
        controller.stdout.close()
        await until(lambda pids=pids: all(start_ticks(pid) is None for pid in pids))
    last = start(tmp_path, "last")
    assert last.stdout is not None
    assert last.wait(timeout=60) == 0
    last.stdout.close()
    with RunStore.open_reader(tmp_path / "run.db") as store:
        store.check()
        assert store.jobs.counts() == {"queued": 0, "running": 0, "done": 12, "failed": 0}
        done_events = [
            e.subject for e in store.events.since(0, limit=10_000) if e.kind == "job.done"
        ]
        assert sorted(done_events) == sorted(f"j{n}" for n in range(12))
        assert [job.result for job in store.jobs.all()] == [n * n for n in range(12)]
        assert store.processes.all() == []
        assert store.jobs.leases() == []


def launch(command: list[str], **options) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, **options)


async def test_sweep_ends_what_was_left_behind_and_nothing_else(tmp_path: Path) -> None:
    """A worker that lost its controller but lives on, and a stranger with a recorded number."""
    workers = LocalWorkers(handlers="fleet_handlers:make_handlers", logs=tmp_path / "logs")
    command = [sys.executable, "-c", "import time; time.sleep(300)"]
    with RunStore(tmp_path / "run.db", clock=SystemClock()) as store, GroupCommit(store) as writer:
        provider = LocalProvider(workers, writer)
        marker = provider.marker("cpu-7")
        orphan = launch(command, env={**os.environ, "NESTLING_WORKER": marker})
        stranger = launch(command, start_new_session=True)
        try:
            store.processes.add("cpu-9", pid=stranger.pid, start_ticks=1, boot_id="this")
            assert await provider.sweep() == ["cpu-7", "cpu-9"]
            assert orphan.wait(timeout=10) == -signal.SIGKILL
            assert stranger.poll() is None
            assert store.processes.all() == []
        finally:
            for process in (orphan, stranger):
                process.kill()
                process.wait()
