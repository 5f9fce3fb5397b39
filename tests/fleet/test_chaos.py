"""Workers killed at random moments: every job is done once, with the undisturbed result."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from nestling.fleet.process_tree import start_ticks
from nestling.store.jobs import NewJob

NUM_JOBS = 40


@pytest.mark.slow
async def test_random_kills_lose_nothing(fleet, until, tmp_path: Path) -> None:
    rng = random.Random(7)
    seen: set[int] = set()
    async with fleet(size=2) as room:
        for number in range(NUM_JOBS):
            room.queue.enqueue(
                NewJob(
                    id=f"j{number}",
                    kind="nap",
                    payload={"n": number},
                    group_key=f"g{number % 4}",
                    max_tries=100,
                )
            )
        num_kills = 0
        while room.store.jobs.counts()["done"] < NUM_JOBS:
            await asyncio.sleep(rng.uniform(0.0, 0.8))
            pids = [record.pid for record in room.store.processes.all()]
            seen |= set(pids)
            if pids and num_kills < 30:
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(pids), signal.SIGKILL)
                    num_kills += 1
        assert [job.result for job in room.store.jobs.all()] == [n * n for n in range(NUM_JOBS)]
        done = Counter(
            event.subject
            for event in room.store.events.since(0, limit=100_000)
            if event.kind == "job.done"
        )
        assert done == {f"j{number}": 1 for number in range(NUM_JOBS)}
        assert num_kills >= 10
    await until(lambda: all(start_ticks(pid) is None for pid in seen))


@pytest.mark.slow
async def test_cost_of_a_job_for_the_controller(fleet, record_property) -> None:
    """Reports controller CPU time per job event over small jobs; asserts no time."""
    num_jobs = 300
    async with fleet(size=2) as room:
        await room.do("echo")
        started_cpu, started = time.process_time(), time.perf_counter()
        for number in range(num_jobs):
            job = NewJob(id=f"c{number}", kind="echo", payload={"n": number})
            await room.writer.run(lambda job=job: room.queue.enqueue(job))
        for number in range(num_jobs):
            assert (await room.result(f"c{number}")).state == "done"
        cpu_ms = (time.process_time() - started_cpu) * 1000 / (3 * num_jobs)
        per_s = num_jobs / (time.perf_counter() - started)
    record_property("controller_cpu_ms_per_event", cpu_ms)
    print({"controller_cpu_ms_per_event": round(cpu_ms, 3), "jobs_per_s": round(per_s, 1)})
