"""No cap is passed at any moment, by 50 submitters in several processes, whatever they ask."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from nestling.store import RunStore

NUM_PROCESSES, NUM_THREADS = 5, 10

_SUBMIT = """
import random, sys, threading
from pathlib import Path
from nestling.core.clock import SystemClock
from nestling.fleet.budget import Budget, BudgetRefusedError, Caps, Price
from nestling.store import GroupCommit, RunStore
path, seed, name, run_usd, day_usd, episode_usd = sys.argv[1:]
caps = Caps(run_usd=float(run_usd), day_usd=float(day_usd), episode_usd=float(episode_usd))
prices = {"box": Price(usd_per_hour=3600.0, unit="one box", source="test")}
with RunStore(Path(path)) as store, GroupCommit(store) as writer:
    money = Budget(store, clock=SystemClock(), caps=caps, prices=prices)

    def submit(thread):
        rng = random.Random(f"{seed}/{name}/{thread}")
        held = []
        for number in range(8):
            key, seconds = f"{name}-{thread}-{number}", rng.uniform(0.05, 2.0)
            ask = lambda: money.reserve(
                key, machine="box", seconds=seconds, episode_id=f"e{rng.randrange(6)}"
            )
            try:
                # Half of them through the group commit, half straight to the file.
                writer.submit(ask).result() if rng.random() < 0.5 else ask()
            except BudgetRefusedError:
                pass
            else:
                held.append((key, seconds))
            if held and rng.random() < 0.6:
                key, seconds = held.pop(rng.randrange(len(held)))
                money.settle(key, machine="box", seconds=seconds * rng.random())

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(int(10))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def spend(path: Path, seed: int, caps: dict[str, float]) -> None:
    numbers = [str(caps[name]) for name in ("run", "day", "episode")]
    RunStore(path).close()
    processes = [
        subprocess.Popen([sys.executable, "-c", _SUBMIT, str(path), str(seed), f"p{n}", *numbers])
        for n in range(NUM_PROCESSES)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0] * NUM_PROCESSES


def highest_moments(store: RunStore) -> dict[str, int]:
    """The most that was ever reserved and spent together, by scope, from the event log."""
    records = {record.id: record for record in store.money.all()}
    used: dict[str, int] = defaultdict(int)
    highest: dict[str, int] = defaultdict(int)
    reserved: dict[str, int] = {}
    for event in store.events.since(0, limit=1_000_000):
        if event.kind == "money.reserved":
            change = reserved[event.subject] = event.data["microusd"]
        elif event.kind == "money.settled":
            change = event.data["spent_microusd"] - reserved[event.subject]
        else:
            assert event.kind == "money.refused"
            continue
        record = records[event.subject]
        for scope in ("run", f"day:{record.day}", f"episode:{record.episode_id}"):
            used[scope] += change
            highest[scope] = max(highest[scope], used[scope])
    for scope, microusd in used.items():
        total = store.money.total(scope)
        assert microusd == total.reserved_microusd + total.spent_microusd
    return highest


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))]
)
def test_no_cap_is_ever_passed(tmp_path: Path, seed: int) -> None:
    # Which cap binds changes with the seed.
    caps = {
        "run": (20.0, 1e3, 1e3)[seed % 3],
        "day": (1e3, 15.0, 1e3)[seed % 3],
        "episode": (1e3, 1e3, 4.0)[seed % 3],
    }
    spend(tmp_path / "run.db", seed, caps)
    with RunStore(tmp_path / "run.db") as store:
        highest = highest_moments(store)
        for scope, microusd in highest.items():
            assert microusd <= caps[scope.partition(":")[0]] * 1_000_000
        binding = ("run", "day", "episode")[seed % 3]
        reached = max(m for scope, m in highest.items() if scope.partition(":")[0] == binding)
        assert reached > 0.6 * caps[binding] * 1_000_000
        refused = [e for e in store.events.since(0, limit=1_000_000) if e.kind == "money.refused"]
        assert refused
