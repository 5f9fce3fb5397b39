"""No cap is passed at any moment, by 50 submitters in several processes, whatever they ask.

Of one run, and for the cap per day of several runs, some of which are killed.
"""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from nestling.core.clock import SystemClock
from nestling.fleet.budget import Budget, Caps, Price
from nestling.store import RunStore
from nestling.store.account import Account

pytestmark = pytest.mark.long

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


_SUBMIT_OF_A_RUN = """
import random, sys, threading
from pathlib import Path
from nestling.core.clock import SystemClock
from nestling.fleet.budget import Budget, BudgetRefusedError, Caps, Price
from nestling.store import GroupCommit, RunStore
from nestling.store.account import Account
folder, seed, name, day_usd = sys.argv[1:]
prices = {"box": Price(usd_per_hour=3600.0, unit="one box", source="test")}
path = Path(folder) / f"{name}.db"
with RunStore(path) as store, GroupCommit(store) as writer, Account(Path(folder) / "account.db") as a:
    money = Budget(
        store, clock=SystemClock(), caps=Caps(day_usd=float(day_usd)), prices=prices, account=a
    )
    writer.submit(money.recover).result()

    def submit(thread):
        rng = random.Random(f"{seed}/{name}/{thread}")
        held = []
        for number in range(8):
            key, seconds = f"{thread}-{number}", rng.uniform(0.05, 2.0)
            ask = lambda: money.reserve(key, machine="box", seconds=seconds)
            try:
                writer.submit(ask).result() if rng.random() < 0.5 else ask()
            except BudgetRefusedError as error:
                assert "day_usd" in str(error) and "all runs" in str(error), error
            else:
                held.append((key, seconds))
            if held and rng.random() < 0.6:
                key, seconds = held.pop(rng.randrange(len(held)))
                money.settle(key, machine="box", seconds=seconds * rng.random())
        return held

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""

_REMEMBER_THE_HIGHEST = """
CREATE TABLE highest (microusd INTEGER NOT NULL);
INSERT INTO highest VALUES (0);
CREATE TRIGGER after_insert AFTER INSERT ON days BEGIN
  UPDATE highest SET microusd =
    max(microusd, (SELECT sum(reserved_microusd + spent_microusd) FROM days));
END;
CREATE TRIGGER after_update AFTER UPDATE ON days BEGIN
  UPDATE highest SET microusd =
    max(microusd, (SELECT sum(reserved_microusd + spent_microusd) FROM days));
END;
"""
"""In the ledger's own transactions, so that no moment is missed. (Not across midnight: the sum is
over all days and can then only be larger.)"""


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 8))]
)
def test_day_cap_holds_over_all_runs_also_when_they_are_killed(tmp_path: Path, seed: int) -> None:
    cap_usd, rng = 15.0, random.Random(seed)
    path = tmp_path / "account.db"
    Account(path).close()
    other = sqlite3.connect(path)
    other.executescript(_REMEMBER_THE_HIGHEST)
    other.close()
    names = [f"run{number}" for number in range(NUM_PROCESSES)]

    def start(name: str) -> subprocess.Popen[bytes]:
        arguments = [str(tmp_path), str(seed), name, str(cap_usd)]
        return subprocess.Popen([sys.executable, "-c", _SUBMIT_OF_A_RUN, *arguments])

    processes = {}
    for name in names[
        :2
    ]:  # killed while they reserve, before all is spent, and never started again
        processes[name] = start(name)
        while processes[name].poll() is None and not _has_reserved(tmp_path / f"{name}.db"):
            time.sleep(0.002)  # one that finds nothing left ends by itself
        time.sleep(rng.uniform(0.0, 0.02))
        processes[name].send_signal(signal.SIGKILL)
    processes |= {name: start(name) for name in names[2:]}
    codes = [process.wait(timeout=300) for process in processes.values()]
    assert codes[2:] == [0] * (NUM_PROCESSES - 2)

    other = sqlite3.connect(path)
    highest = other.execute("SELECT microusd FROM highest").fetchone()[0]
    other.close()
    assert 0.6 * cap_usd * 1_000_000 < highest <= cap_usd * 1_000_000
    assert _of_runs(tmp_path, names) <= _of_ledger(path)  # it never counts less than the runs
    for name in names:
        _recover(tmp_path, name)
    assert _of_runs(tmp_path, names) <= _of_ledger(path) <= cap_usd * 1_000_000
    with Account(path) as account:
        assert all(
            account.ledger.open_of(str((tmp_path / f"{n}.db").resolve())) == [] for n in names
        )


def _has_reserved(path: Path) -> bool:
    if not path.exists():
        return False
    with RunStore(path) as store:
        return bool(store.money.all())


def _recover(folder: Path, name: str) -> None:
    prices = {"box": Price(usd_per_hour=3600.0, unit="one box", source="test")}
    with RunStore(folder / f"{name}.db") as store, Account(folder / "account.db") as account:
        Budget(store, clock=SystemClock(), caps=Caps(), prices=prices, account=account).recover()


def _of_runs(folder: Path, names: list[str]) -> int:
    used = 0
    for name in names:
        with RunStore(folder / f"{name}.db") as store:
            total = store.money.total()
            used += total.reserved_microusd + total.spent_microusd
    return used


def _of_ledger(path: Path) -> int:
    connection = sqlite3.connect(path)
    used = connection.execute(
        "SELECT ifnull(sum(reserved_microusd + spent_microusd), 0) FROM days"
    ).fetchone()[0]
    connection.close()
    return int(used)
