"""Real worker processes, really killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from nestling.core.errors import FleetError
from nestling.fleet import process_tree
from nestling.fleet.budget import Budget, Caps, Price
from nestling.fleet.pool import PoolLimits
from nestling.fleet.process_tree import start_ticks
from nestling.fleet.providers.local import LocalProvider, LocalWorkers
from nestling.store import GroupCommit, RunStore
from nestling.store.jobs import NewJob

pytestmark = pytest.mark.long


async def test_twenty_jobs_on_two_workers_each_once(fleet) -> None:
    async with fleet(size=2) as room:
        for number in range(20):
            room.queue.enqueue(
                NewJob(
                    id=f"j{number}",
                    kind="echo",
                    payload={"n": number},
                    group_key=f"g{number % 3}",
                )
            )
        records = [await room.result(f"j{number}") for number in range(20)]
        assert [record.result["echo"]["n"] for record in records] == list(range(20))
        assert all(record.tries == 1 for record in records)
        kinds = Counter(event.kind for event in room.store.events.since(0))
        assert kinds["job.done"] == 20
        assert set(kinds) == {
            "job.queued",
            "job.started",
            "job.done",
            "worker.launched",
        }
        assert sorted(await room.provider.list()) == ["cpu-0", "cpu-1"]
    # One process did many: workers stay warm.
    assert len({record.result["pid"] for record in records}) <= 2


async def test_job_of_a_killed_worker_is_done_once_by_another(fleet, tmp_path: Path) -> None:
    async with fleet() as room:
        record = await room.do("die_once", {"mark": str(tmp_path / "mark")})
        assert (record.state, record.tries) == ("done", 2)
        assert record.result["pid"] != record.result["first"]
        kinds = [event.kind for event in room.store.events.of(record.id)]
        assert kinds.count("job.done") == 1
        assert "job.requeued" in kinds


async def test_worker_killed_from_outside(fleet, until, tmp_path: Path) -> None:
    started = tmp_path / "started"
    async with fleet() as room:
        waiting = asyncio.ensure_future(room.do("sleep", {"started": str(started), "seconds": 0.4}))
        await until(lambda: started.exists() and started.read_text())
        os.kill(int(started.read_text()), signal.SIGKILL)
        record = await waiting
        assert (record.state, record.result, record.tries) == ("done", "slept", 2)


async def test_job_that_kills_its_workers_is_given_up(fleet) -> None:
    async with fleet() as room:
        record = await room.do("die", max_tries=2)
        assert (record.state, record.reason, record.tries) == ("failed", "lost", 2)
        assert (await room.do("echo")).state == "done"


async def test_frozen_worker_is_replaced(fleet) -> None:
    async with fleet(lease_s=0.5) as room:
        record = await room.do("freeze", max_tries=1)
        assert (record.state, record.reason) == ("failed", "lost")
        assert "silent" in str(record.detail)
        assert (await room.do("echo")).state == "done"


async def test_stage_and_job_deadlines(fleet, tmp_path: Path) -> None:
    async with fleet() as room:
        stage = await room.do("stages")
        assert (stage.state, stage.reason, stage.tries) == ("failed", "timed_out", 1)
        assert "train" in str(stage.detail)
        job = await room.do(
            "sleep", {"started": str(tmp_path / "s"), "seconds": 60}, deadline_s=0.3
        )
        assert (job.state, job.reason) == ("failed", "timed_out")


async def test_errors_of_handlers_are_told_apart(fleet) -> None:
    async with fleet() as room:
        rejected = await room.do("reject")
        assert (rejected.reason, rejected.tries) == ("train.diverged", 1)
        crashed = await room.do("crash", max_tries=2)
        assert (crashed.reason, crashed.tries) == ("worker.exception", 2)
        assert "a bug" in str(crashed.detail)
        unknown = await room.do("juggle")
        assert unknown.reason == "worker.unknown_kind"


async def test_process_that_cannot_be_ended_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that the kernel holds; it stays on record for the next controller."""
    with RunStore(tmp_path / "run.db") as store, GroupCommit(store) as writer:
        provider = LocalProvider(
            LocalWorkers(
                handlers="fleet_handlers:make_handlers",
                logs=tmp_path / "logs",
                environment={"PYTHONPATH": str(Path(__file__).parent)},
            ),
            writer,
        )
        node = await provider.launch("cpu-0")
        with monkeypatch.context() as patch:
            patch.setattr(process_tree, "end_tree", lambda pid, marker: [pid])
            with pytest.raises(FleetError, match=rf"processes \[{node.process.pid}\] cannot be"):
                await provider.terminate("cpu-0")
        assert await provider.sweep() == ["cpu-0"]
        await node.close()
        assert await provider.list() == []


async def test_nothing_a_worker_started_outlives_it(fleet, until, tmp_path: Path) -> None:
    started = tmp_path / "started"
    async with fleet() as room:
        payload = {"started": str(started), "seconds": 60}
        waiting = asyncio.ensure_future(room.do("leave_children", payload, max_tries=1))
        await until(lambda: started.exists() and len(started.read_text().split()) == 3)
        os.kill(int(started.read_text().split()[0]), signal.SIGKILL)
        assert (await waiting).reason == "lost"
        pids = [int(pid) for pid in started.read_text().split()]
        await until(lambda: all(start_ticks(pid) is None for pid in pids))


async def test_worker_sees_no_secrets_and_one_thread(
    fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "canary")
    async with fleet() as room:
        environment = (await room.do("environment")).result
        assert "canary" not in str(environment)
        assert environment["OMP_NUM_THREADS"] == "1"


async def test_workers_that_cannot_start_end_the_pool_with_their_words(fleet) -> None:
    limits = PoolLimits(backoff_s=0.01, max_failed_starts=2)
    with pytest.raises(ExceptionGroup) as caught:
        async with fleet(settings={"broken_start": True}, limits=limits) as room:
            await room.do("echo")
    error = caught.value.exceptions[0]
    assert isinstance(error, FleetError)
    assert "the accelerator is on fire" in str(error)


async def test_money_goes_by_what_a_worker_really_is(fleet, monkeypatch, until) -> None:
    """A provider that takes what it gets: its nodes say what they are."""
    prices = {
        name: Price(usd_per_hour=usd, unit="one", source="test")
        for name, usd in (("cpu-core", 3600.0), ("a40", 36.0), ("h200", 360.0))
    }

    def make_budget(store: RunStore) -> Budget:
        return Budget(store, clock=store.clock, caps=Caps(), prices=prices)

    launch = LocalProvider.launch

    async def launch_some_gpu(self, name):
        node = await launch(self, name)
        node.machine = {"cpu-0": "a40", "cpu-1": "h200"}[name]
        return node

    monkeypatch.setattr(LocalProvider, "launch", launch_some_gpu)
    async with fleet(size=2, make_budget=make_budget) as room:
        seen = {}
        while len(seen) < 2:
            record = await room.do("hardware", family="ledger")
            seen[record.worker] = record
        records = room.store.money.all()
        for one in records:
            assert one.machine in ("a40", "h200")
            usd_per_s = prices[one.machine].usd_per_hour / 3600
            assert one.spent_microusd == pytest.approx(one.seconds * usd_per_s * 1e6, abs=2)
        assert {row.machine for row in room.store.money.spending()} == {"a40", "h200"}
        await until(lambda: room.pool._machines == {})  # nothing is kept of tries that are over


async def test_interrupted_pool_gives_its_jobs_back(fleet, until, tmp_path: Path) -> None:
    started = tmp_path / "started"

    async def interrupted() -> None:
        async with fleet() as room:
            payload = {"started": str(started), "seconds": 60}
            room.queue.enqueue(NewJob(id="a", kind="sleep", payload=payload))
            await until(lambda: started.exists() and started.read_text())
            raise KeyError("interrupted")

    with pytest.raises(ExceptionGroup, match="unhandled"):
        await interrupted()
    assert start_ticks(int(started.read_text())) is None
    with RunStore.open_reader(tmp_path / "run.db") as store:
        record = store.jobs.get("a")
        assert (record.state, record.tries) == ("queued", 0)
        assert store.jobs.leases() == []
        assert store.processes.all() == []
