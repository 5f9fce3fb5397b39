"""A process that only writes its run: jobs, money, turns and rewards, from several threads.

    python store_writer.py DATABASE LIFE

Prints a line for every change that it was told is on disk.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from nestling.core.clock import SystemClock
from nestling.fleet.budget import Budget, Caps, Price
from nestling.fleet.queue import JobQueue
from nestling.store import GroupCommit, RunStore
from nestling.store.jobs import NewJob

NUM_THREADS = 4
PRICES = {"box": Price(usd_per_hour=3600.0, unit="one box", source="test")}


def main(path: Path, life: str) -> None:
    with RunStore(path) as store, GroupCommit(store) as writer:
        queue = JobQueue(store, clock=SystemClock(), session=life)
        budget = Budget(store, clock=SystemClock(), caps=Caps(run_usd=1e6), prices=PRICES)
        queue.recover()
        budget.recover()
        _tell(f"open {life}")

        def serve(thread: int) -> None:
            number = 0
            while True:
                _one_episode(store, writer, queue, budget, f"{life}-{thread}-{number}")
                number += 1

        for thread in range(NUM_THREADS):
            threading.Thread(target=serve, args=(thread,), daemon=True).start()
        threading.Event().wait()


def _tell(line: str) -> None:
    """One write, so that the lines of several threads do not mix."""
    os.write(1, f"{line}\n".encode())


def _one_episode(
    store: RunStore, writer: GroupCommit, queue: JobQueue, budget: Budget, name: str
) -> None:
    """Every line names a change after it was acknowledged."""

    def begin() -> None:
        with store.transaction():
            store.progress.open_group(
                name, purpose="train", step=0, family="f", seed=0, size=1, learner_version=None
            )
            store.episodes.start(name, group_id=name, idx=0, family="f", policy="p", seed=0)
            queue.enqueue(NewJob(id=f"job-{name}", kind="run", payload={}, max_tries=1000))

    def claim() -> str:
        with store.transaction():
            taken = queue.claim("w")
            assert taken is not None
            budget.reserve(taken.token, machine="box", seconds=2.0, job_id=taken.job.id)
        return taken.token

    def complete(token: str) -> None:
        with store.transaction():
            assert queue.complete(token, {"reward": 0.5})
            budget.settle(token, machine="box", seconds=1.0)

    def pay() -> None:
        store.episodes.finish(name, outcome="succeeded", kind="seed", reward=0.5, terms={})

    writer.submit(begin).result()
    _tell(f"begun {name}")
    token = writer.submit(claim).result()
    writer.submit(lambda: complete(token)).result()
    _tell(f"done {token.partition('#')[0]}")
    writer.submit(pay).result()
    _tell(f"paid {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
