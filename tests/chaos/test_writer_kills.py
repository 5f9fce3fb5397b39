"""The store's writer is killed at random moments: what it acknowledged stays, and stays whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from nestling.store import RunStore

WRITER = Path(__file__).parent / "store_writer.py"


def kill_writers(path: Path, num_kills: int, rng: random.Random) -> dict[str, set[str]]:
    """Start and kill it so often on one store; what it acknowledged, by kind of change."""
    told: dict[str, set[str]] = {"open": set(), "begun": set(), "done": set(), "paid": set()}
    for life in range(num_kills):
        process = subprocess.Popen(
            [sys.executable, str(WRITER), str(path), f"life{life}"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        assert lines[0].startswith("open"), "it did not start"
        time.sleep(rng.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        # The last line may itself be cut short by the kill.
        lines += process.stdout.read().split("\n")[:-1]
        process.stdout.close()
        process.wait()
        for line in lines:
            kind, _, name = line.strip().partition(" ")
            told[kind].add(name)
    return told


def check(path: Path, told: dict[str, set[str]]) -> None:
    with RunStore(path) as store:
        store.check()
        events = list(store.events.since(0, limit=10_000_000))
        seen = Counter((event.kind, event.subject) for event in events)
        assert told["begun"], "nothing was written"
        for name in told["begun"]:
            assert seen[("job.queued", f"job-{name}")] == 1
            assert store.episodes.get(name).state in ("running", "finished")
        for job_id in told["done"]:
            assert store.jobs.get(job_id).state == "done"
        for name in told["paid"]:
            reward = store.episodes.reward(name)
            assert reward is not None
            assert reward.reward == 0.5
        assert {n for (kind, _), n in seen.items() if kind in ("job.done", "episode.finished")} == {
            1
        }
        # Every job is there once, in one state, with a lease exactly when it runs.
        jobs = store.jobs.all()
        assert len(jobs) == len({job.id for job in jobs})
        assert {lease.job_id for lease in store.jobs.leases()} == {
            job.id for job in jobs if job.state == "running"
        }
        assert store.jobs.waiting() == sum(job.state == "queued" for job in jobs)
        # Money: running totals are the sum of the records, and a done job was paid for once.
        money, total = store.money.all(), store.money.total()
        assert total.spent_microusd == sum(record.spent_microusd for record in money)
        assert total.reserved_microusd == sum(
            record.reserved_microusd for record in money if record.state == "reserved"
        )
        settled = Counter(record.job_id for record in money if record.seconds == 1.0)
        assert set(settled.values()) <= {1}
        assert set(settled) == {job.id for job in jobs if job.state == "done"}


@pytest.mark.long
def test_few_kills_of_the_writer(tmp_path: Path) -> None:
    told = kill_writers(tmp_path / "run.db", 4, random.Random(1))
    check(tmp_path / "run.db", told)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_hundred_kills_of_the_writer(tmp_path: Path, record_property) -> None:
    seed = int(os.environ.get("NESTLING_CHAOS_SEED", "0"))
    told = kill_writers(tmp_path / "run.db", 100, random.Random(seed))
    check(tmp_path / "run.db", told)
    record_property("kills_of_store_writer", len(told["open"]))
    print({"kills": len(told["open"]), "paid": len(told["paid"])})
