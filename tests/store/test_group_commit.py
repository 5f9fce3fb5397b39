"""Many small changes share one fsync and each is durable when answered."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from nestling.core.clock import SystemClock
from nestling.core.errors import StoreError
from nestling.fleet.queue import JobQueue
from nestling.store import GroupCommit, RunStore
from nestling.store.jobs import NewJob


def test_order_is_kept_and_failures_stay_alone(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run.db") as store, GroupCommit(store) as writer:

        def broken() -> None:
            store.set_meta("undone", "x")
            raise KeyError("mine")

        first = writer.submit(lambda: store.set_meta("a", "1"))
        failed = writer.submit(broken)
        last = writer.submit(lambda: store.set_meta("a", "2"))
        assert (first.result(), last.result()) == (None, None)
        with pytest.raises(KeyError, match="mine"):
            failed.result()
        assert store.meta("a") == "2"
        assert store.meta("undone") is None


async def test_event_loop_is_answered_after_the_commit(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with (
        RunStore(path) as store,
        GroupCommit(store) as writer,
        RunStore.open_reader(path) as reader,
    ):
        await writer.run(lambda: store.set_meta("a", "1"))
        assert reader.meta("a") == "1"


def test_closed_writer_refuses(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run.db") as store:
        writer = GroupCommit(store)
        futures = [writer.submit(lambda n=n: store.set_meta(str(n), "x")) for n in range(100)]
        writer.close()
        writer.close()
        assert all(future.done() for future in futures)
        assert store.meta("99") == "x"
        with pytest.raises(StoreError, match="closed"):
            writer.submit(lambda: None)


@pytest.mark.long
def test_rate_of_durable_state_changes(tmp_path: Path, record_property) -> None:
    """Reports queue changes a second (enqueue, claim, complete), each with its event, on disk."""
    num_jobs, num_threads = 1200, 8
    with RunStore(tmp_path / "run.db") as store, GroupCommit(store) as writer:
        queue = JobQueue(store, clock=SystemClock(), session="s")

        def work(thread: int) -> None:
            for number in range(0, num_jobs // num_threads, 25):
                names = [f"j{thread}-{n}" for n in range(number, min(number + 25, 150))]
                jobs = [NewJob(id=name, kind="run", payload={}) for name in names]
                for future in [writer.submit(lambda j=j: queue.enqueue(j)) for j in jobs]:
                    future.result()
                claims = [writer.submit(lambda: queue.claim("w")) for _ in jobs]
                tokens = [claim.token for c in claims if (claim := c.result()) is not None]
                done = [writer.submit(lambda t=t: queue.complete(t, {"ok": 1})) for t in tokens]
                assert all(future.result() for future in done)

        started = time.perf_counter()
        threads = [threading.Thread(target=work, args=(n,)) for n in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rate = 3 * num_jobs / (time.perf_counter() - started)
        assert store.jobs.counts()["done"] == num_jobs
        assert len(store.events.since(0, limit=10_000)) == 3 * num_jobs
    record_property("durable_state_changes_per_s", rate)
    print(json.dumps({"durable_state_changes_per_s": round(rate)}))
