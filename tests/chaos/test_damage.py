"""Power cuts, full disks, locks and clocks: the run goes on from a whole state, or says so."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from nestling.core.errors import StoreError
from nestling.fleet.budget import Budget, Caps, Price
from nestling.fleet.queue import JobQueue
from nestling.store import RunStore
from nestling.store.jobs import NewJob

pytestmark = [pytest.mark.timeout(1800), pytest.mark.long]

NUM_JOBS = 60
PRICES = {"box": Price(usd_per_hour=3600.0, unit="one box", source="test")}


@dataclass
class HandClock:
    wall_s: float = 1_900_000_000.0
    mono_s: float = 1000.0

    def now(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.mono_s


def serve(path: Path, session: str, clock: HandClock, *, rounds: int = 10**9) -> list[int]:
    """Queue all jobs (again) and do `rounds` of them; number of events after every change."""
    with RunStore(path, clock=clock) as store:
        return _serve(store, session, clock, rounds)


def _serve(store: RunStore, session: str, clock: HandClock, rounds: int) -> list[int]:
    queue = JobQueue(store, clock=clock, session=session, lease_s=60.0)
    budget = Budget(store, clock=clock, caps=Caps(), prices=PRICES)
    queue.recover()
    budget.recover()
    states = [store.events.last_seq()]
    for number in range(NUM_JOBS):
        queue.enqueue(
            NewJob(id=f"j{number}", kind="run", payload={}, reuse_key=f"k{number}", max_tries=99)
        )
        states.append(store.events.last_seq())
    for _ in range(rounds):
        with store.transaction():
            claim = queue.claim("w")
            if claim is None:
                break
            budget.reserve(claim.token, machine="box", seconds=2.0, job_id=claim.job.id)
        states.append(store.events.last_seq())
        with store.transaction():
            assert queue.complete(claim.token, {"n": claim.job.id})
            budget.settle(claim.token, machine="box", seconds=1.0)
        states.append(store.events.last_seq())
    return states


def assert_all_done_once(path: Path) -> None:
    with RunStore(path) as store:
        store.check()
        assert store.jobs.counts() == {"queued": 0, "running": 0, "done": NUM_JOBS, "failed": 0}
        done = Counter(
            e.subject for e in store.events.since(0, limit=100_000) if e.kind == "job.done"
        )
        assert done == {f"j{n}": 1 for n in range(NUM_JOBS)}
        money, total = store.money.all(), store.money.total()
        assert total.reserved_microusd == 0
        assert total.spent_microusd == sum(record.spent_microusd for record in money)
        assert sum(record.seconds == 1.0 for record in money) == NUM_JOBS


@pytest.fixture(scope="module")
def cut_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes, list[int]]:
    """Database, write-ahead log and event counts of a run in its middle, nothing checkpointed."""
    path = tmp_path_factory.mktemp("power") / "run.db"
    clock = HandClock()
    store = RunStore(path, clock=clock)
    states = _serve(store, "first", clock, NUM_JOBS // 2)
    files = path.read_bytes(), path.with_name("run.db-wal").read_bytes()
    store.close()
    return (*files, states)


def put(folder: Path, database: bytes, wal: bytes) -> Path:
    folder.mkdir()
    (folder / "run.db").write_bytes(database)
    (folder / "run.db-wal").write_bytes(wal)
    return folder / "run.db"


def damaged_wals(wal: bytes, rng: random.Random, count: int) -> Iterator[bytes]:
    """Cut at any byte; cut and followed by what was on the disk before; a page half written."""
    for number in range(count):
        cut = rng.randrange(len(wal) + 1)
        rest = len(wal) - cut
        if number % 3 == 0:
            yield wal[:cut]
        elif number % 3 == 1:
            yield wal[:cut] + rng.randbytes(min(rest, 8192))
        else:
            torn = min(rest, 512 * rng.randrange(1, 8))
            yield wal[:cut] + bytes(torn) + wal[cut + torn :]


@pytest.mark.parametrize("count", [9, pytest.param(150, marks=pytest.mark.slow)])
def test_cut_wal_is_a_whole_earlier_state_and_the_run_goes_on(
    tmp_path: Path, cut_run: tuple[bytes, bytes, list[int]], count: int
) -> None:
    database, wal, states = cut_run
    found = set()
    for number, damaged in enumerate(damaged_wals(wal, random.Random(count), count)):
        path = put(tmp_path / str(number), database, damaged)
        with RunStore(path) as store:
            store.check()
            last = store.events.last_seq()
            assert last == 0 or last in states, "half a change was kept"
            found.add(last)
        serve(path, "second", HandClock())
        assert_all_done_once(path)
    assert len(found) > count // 4  # the cuts were really at different changes


def named_damage(path: Path) -> str | None:
    """What opening and reading the whole file says; None when it is sound."""
    try:
        with RunStore(path) as store:
            store.check()
    except StoreError as error:
        return str(error)
    return None


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_torn_pages_of_the_database_are_repaired_or_named(
    tmp_path: Path, cut_run: tuple[bytes, bytes, list[int]], count: int
) -> None:
    """Power fails while pages are copied from the log into the database.

    Every page in the log is whole there, so such pages are repaired; any other must be an error.
    """
    wal = cut_run[1]
    rng = random.Random(count)
    page_size = 4096
    whole = put(tmp_path / "whole", *cut_run[:2])
    RunStore(whole).close()  # the log is copied into the database
    complete = whole.read_bytes()
    outcomes: Counter[str] = Counter()
    for number in range(count):
        data = bytearray(complete)
        for _ in range(3):
            start = rng.randrange(len(data) // page_size) * page_size + 512 * rng.randrange(8)
            data[start : start + 2048] = rng.randbytes(len(data[start : start + 2048]))
        keeps_log = number % 2 == 0
        path = put(tmp_path / str(number), bytes(data), wal if keeps_log else b"")
        named = named_damage(path)
        outcomes["repaired" if named is None else "named"] += 1
        if named is None:
            serve(path, "second", HandClock())
            assert_all_done_once(path)
        assert named is None or not keeps_log, "a page that is whole in the log was not repaired"
    assert outcomes["repaired"] >= count // 2
    print(dict(outcomes))


def test_full_disk_stops_the_run_and_a_later_one_goes_on(tmp_path: Path) -> None:
    path, clock = tmp_path / "run.db", HandClock()
    reached = []
    RunStore(path, clock=clock).close()
    empty = path.stat().st_size // 4096
    for number, pages in enumerate((empty + 2, empty + 4, empty + 6)):
        with RunStore(path, clock=clock) as store:
            store.limit_pages(pages)
            with pytest.raises(StoreError, match="free disk space"):
                _serve(store, f"s{number}", clock, 10**9)
            reached.append(store.events.last_seq())
    assert reached == sorted(set(reached))
    serve(path, "last", clock)
    assert_all_done_once(path)


@contextmanager
def locked(path: Path, seconds: float, times: int) -> Iterator[None]:
    """Another program that holds the write lock again and again."""
    stop = threading.Event()

    def hold() -> None:
        other = sqlite3.connect(path, isolation_level=None, timeout=30.0)
        for _ in range(times):
            other.execute("BEGIN IMMEDIATE")
            time.sleep(seconds)
            other.execute("ROLLBACK")
            if stop.wait(0.01):
                break
        other.close()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_busy_store_is_waited_for(tmp_path: Path) -> None:
    path, clock = tmp_path / "run.db", HandClock()
    RunStore(path).close()
    with locked(path, 0.1, 8):
        serve(path, "s", clock)
    assert_all_done_once(path)


@pytest.mark.parametrize("jump_s", [-86_400.0 * 400, 86_400.0 * 400])
def test_jump_of_the_wall_clock_ends_no_lease(tmp_path: Path, jump_s: float) -> None:
    path, clock = tmp_path / "run.db", HandClock()
    serve(path, "s", clock, rounds=10)
    with RunStore(path, clock=clock) as store:
        queue = JobQueue(store, clock=clock, session="s", lease_s=60.0)
        claim = queue.claim("w")
        assert claim is not None
        clock.wall_s += jump_s
        clock.mono_s += 1.0
        assert queue.expire() == []
        assert queue.heartbeat(claim.token)
        assert queue.keep([claim.token, "none#1"]) == ["none#1"]
        assert queue.give_back(claim.token)
        _serve(store, "s", clock, 10**9)
    assert_all_done_once(path)


def test_monotonic_clock_that_starts_again_after_a_reboot(tmp_path: Path) -> None:
    path, clock = tmp_path / "run.db", HandClock(mono_s=1e7)
    serve(path, "before", clock, rounds=10)
    with RunStore(path, clock=clock) as store:
        assert JobQueue(store, clock=clock, session="before").claim("w") is not None
    serve(path, "after", HandClock(mono_s=3.0))
    assert_all_done_once(path)


def test_unreadable_folder_is_named(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="permissions"):
        RunStore(tmp_path / "run.db")
