"""Workers that take too much memory, and a machine that has none left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nestling.core.errors import ConfigError
from nestling.fleet import memory
from nestling.fleet.memory import (
    OVER_SHARE,
    MemoryGuard,
    MemoryLimits,
    available_bytes,
    memory_limits,
    tree_bytes,
)
from nestling.store.jobs import NewJob

MIB = 2**20


def test_tree_counts_children_also_in_sessions_of_their_own() -> None:
    script = (
        "import os, subprocess, sys\n"
        "hold = bytearray(80 * 2**20)\n"
        "child = subprocess.Popen([sys.executable, '-c', "
        "'hold = bytearray(60 * 2**20); print(1, flush=True); input()'], "
        "stdin=subprocess.PIPE, start_new_session=True)\n"
        "input(); child.communicate(b'\\n')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()  # the child holds its memory
    cheap = tree_bytes([process.pid, os.getpid()], float("inf"))
    exact = tree_bytes([process.pid], 0.0)[process.pid]
    process.communicate(b"\n")
    assert 140 * MIB < exact <= cheap[process.pid] < 400 * MIB
    assert cheap[os.getpid()] > 0
    assert tree_bytes([process.pid], 0.0) == {process.pid: 0}  # gone


def test_shares_of_a_machine() -> None:
    limits = memory_limits(worker_gib=0.0, num_workers=4, least_free_gib=0.5, machine_gib=16.0)
    assert limits.worker_gib == pytest.approx(3.6)
    assert memory_limits(worker_gib=2.0, num_workers=4, least_free_gib=1.0).worker_gib == 2.0
    with pytest.raises(ConfigError, match=r"64 workers on 8\.0 GiB"):
        memory_limits(worker_gib=0.0, num_workers=64, least_free_gib=0.5, machine_gib=8.0)
    assert 0 < available_bytes() <= psutil.virtual_memory().total


def test_limits_of_a_container_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("2147483648\n")
    (tmp_path / "memory.current").write_text("1610612736\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 268435456\n")
    assert available_bytes() == 768 * MIB
    assert memory_limits(worker_gib=0.0, num_workers=2, least_free_gib=0.5).worker_gib == 0.9
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.5)


@pytest.mark.long
async def test_job_over_its_share_ends_with_its_own_reason(fleet, until) -> None:
    memory = MemoryLimits(worker_gib=0.25, least_free_gib=0.0, every_s=0.02)
    async with fleet(memory=memory) as room:
        record = await room.do("take_memory", {"mib": 400})
        assert (record.state, record.reason, record.tries) == ("failed", OVER_SHARE, 1)
        assert "0.25 GiB, the share of one worker" in str(record.detail)
        assert (await room.do("take_memory", {"mib": 10})).state == "done"
        # A later job of the same worker may suffer for an earlier one: it has a fresh worker.
        record = await room.do("take_memory", {"mib": 400}, max_tries=3)
        assert (record.state, record.reason, record.tries) == ("failed", OVER_SHARE, 2)
        assert (await room.do("echo")).state == "done"


async def test_children_of_a_job_count_too(fleet) -> None:
    memory = MemoryLimits(worker_gib=0.25, least_free_gib=0.0, every_s=0.02)
    async with fleet(memory=memory) as room:
        record = await room.do("child_takes_memory", {"mib": 400}, max_tries=1)
        assert record.reason == OVER_SHARE


@pytest.mark.long
async def test_short_machine_holds_jobs_back_but_always_runs_one(
    fleet, until, tmp_path: Path
) -> None:
    free = [0]
    memory = MemoryLimits(worker_gib=4.0, least_free_gib=1.0, every_s=0.01)
    async with fleet(size=2, memory=memory) as room:
        room.provider.guard.available = lambda: free[0]
        await until(lambda: not room.provider.guard.has_room)
        started = [tmp_path / name for name in "ab"]
        for number, path in enumerate(started):
            payload = {"started": str(path), "seconds": 600}
            room.queue.enqueue(NewJob(id=f"j{number}", kind="sleep", payload=payload))
        await until(lambda: room.store.jobs.counts()["running"] == 1)
        for _ in range(20):  # the idle worker is asked again and again
            await asyncio.sleep(0.02)
            assert room.store.jobs.counts()["running"] == 1, room.store.jobs.all()
        free[0] = 2**40
        await until(lambda: room.store.jobs.counts()["running"] == 2)
        for lease in room.store.jobs.leases():
            room.queue.fail(lease.token, "timed_out", "ended by the test", retry=False)
        for name in ("cpu-0", "cpu-1"):
            await room.provider.terminate(name)


async def test_guard_looks_only_at_workers_that_run() -> None:
    ended: list[str] = []

    async def end(name: str, detail: str) -> None:
        ended.append(name)

    guard = MemoryGuard(
        limits=MemoryLimits(worker_gib=1e-6, least_free_gib=0.0),
        workers=lambda: {"gone": 2**22 + 1, "here": os.getpid()},
        end=end,
    )
    await guard.look()
    assert ended == ["here"]
    assert guard.has_room
