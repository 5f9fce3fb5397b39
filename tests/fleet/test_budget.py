"""A cap is never passed, whoever asks and how many at once."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError
from nestling.fleet.budget import Budget, BudgetRefusedError, Caps, Price, load_prices
from nestling.store import RunStore
from nestling.store.account import Account
from nestling.store.ledger import OpenReservation

PRICES = {"box": Price(usd_per_hour=3600.0, unit="one box", source="test")}
"""One dollar a second."""


class Noon:
    """A day that can be turned over by hand."""

    def __init__(self) -> None:
        self.wall_s = 1_900_000_000.0

    def now(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return 0.0


@pytest.fixture
def store(tmp_path: Path):
    with RunStore(tmp_path / "run.db") as opened:
        yield opened


def budget(store: RunStore, **caps: float) -> Budget:
    return Budget(store, clock=SystemClock(), caps=Caps(**caps), prices=PRICES)


def test_reserve_settle_and_refuse(store: RunStore) -> None:
    money = budget(store, run_usd=10.0)
    assert money.reserve("a", machine="box", seconds=6.0) == 6.0
    with pytest.raises(BudgetRefusedError, match=r"6\.0000 USD are spent or reserved"):
        money.reserve("b", machine="box", seconds=6.0)
    assert money.settle("a", machine="box", seconds=1.5) == 1.5
    money.reserve("b", machine="box", seconds=6.0)
    money.reserve("b", machine="box", seconds=6.0)
    money.settle("a", machine="box", seconds=9.0)
    total = store.money.total()
    assert (total.reserved_microusd, total.spent_microusd) == (6_000_000, 1_500_000)
    assert money.refusal(machine="box", seconds=2.0) is None
    assert "run_usd" in str(money.refusal(machine="box", seconds=3.0))
    assert store.money.spent_by("machine") == {"box": (1_500_000, 1.5)}


def test_episode_and_day_caps_are_their_own(store: RunStore) -> None:
    clock = Noon()
    money = Budget(store, clock=clock, caps=Caps(episode_usd=3.0, day_usd=5.0), prices=PRICES)
    money.reserve("a", machine="box", seconds=3.0, episode_id="e1")
    with pytest.raises(BudgetRefusedError, match="episode"):
        money.reserve("b", machine="box", seconds=1.0, episode_id="e1")
    money.reserve("c", machine="box", seconds=2.0, episode_id="e2")
    with pytest.raises(BudgetRefusedError, match="day"):
        money.reserve("d", machine="box", seconds=1.0, episode_id="e3")
    clock.wall_s += 86_400
    money.reserve("d", machine="box", seconds=1.0, episode_id="e3")


def test_day_cap_counts_all_runs_of_the_account(tmp_path: Path) -> None:
    clock = Noon()
    with (
        Account(tmp_path / "account.db", clock=clock) as account,
        RunStore(tmp_path / "one.db") as first,
        RunStore(tmp_path / "two.db") as second,
    ):
        caps = Caps(day_usd=5.0, run_usd=100.0)
        one, two = (
            Budget(store, clock=clock, caps=caps, prices=PRICES, account=account)
            for store in (first, second)
        )
        one.reserve("a", machine="box", seconds=3.0)
        assert "day_usd" in str(two.refusal(machine="box", seconds=2.5))
        with pytest.raises(BudgetRefusedError, match=r"day_usd .* 3\.0000 USD .* all runs on 2030"):
            two.reserve("a", machine="box", seconds=2.5)
        assert second.money.all() == []
        one.settle("a", machine="box", seconds=1.0)
        two.reserve("a", machine="box", seconds=2.5)
        clock.wall_s += 86_400
        two.reserve("b", machine="box", seconds=5.0)
        # A run without a cap of its own is counted all the same.
        free = Budget(first, clock=clock, caps=Caps(), prices=PRICES, account=account)
        free.reserve("c", machine="box", seconds=9.0)
        assert "day_usd" in str(two.refusal(machine="box", seconds=0.1))


def test_ledger_of_a_run_that_died_between_two_files_is_put_right(tmp_path: Path) -> None:
    with (
        Account(tmp_path / "account.db") as account,
        RunStore(tmp_path / "run.db") as store,
    ):
        money = Budget(store, clock=Noon(), caps=Caps(), prices=PRICES, account=account)
        run = str(store.path.resolve())
        for name, seconds in (("settled", 1.0), ("open", 2.0)):
            money.reserve(name, machine="box", seconds=seconds)
        store.money.settle("settled", 250_000, 0.25)  # and died before it told the ledger
        day = store.money.all()[0].day
        account.ledger.reserve(run, OpenReservation(id="lost", day=day, microusd=4_000_000), None)
        assert money.recover() == 1
        total = account.ledger.total(day)
        assert (total.reserved_microusd, total.spent_microusd) == (
            0,
            250_000 + 2_000_000 + 4_000_000,
        )


def test_reservation_that_is_undone_never_counts_too_little(tmp_path: Path) -> None:
    with (
        Account(tmp_path / "account.db") as account,
        RunStore(tmp_path / "run.db") as store,
    ):
        money = Budget(store, clock=Noon(), caps=Caps(day_usd=5.0), prices=PRICES, account=account)

        def settle_then_fail() -> None:
            with store.transaction():
                money.settle("a", machine="box", seconds=1.0)
                raise OSError("the disk is full")

        money.reserve("a", machine="box", seconds=4.0)
        with pytest.raises(OSError, match="full"):
            settle_then_fail()
        assert "day_usd" in str(money.refusal(machine="box", seconds=2.0))
        money.settle("a", machine="box", seconds=1.0)
        assert money.refusal(machine="box", seconds=4.0) is None


def test_overrun_is_recorded_as_it_was(store: RunStore) -> None:
    money = budget(store, run_usd=10.0)
    money.reserve("a", machine="box", seconds=2.0)
    money.settle("a", machine="box", seconds=3.0)
    assert money.spent_usd() == 3.0
    assert [event.kind for event in store.events.of("a")] == ["money.reserved", "money.overrun"]


def test_money_of_a_killed_controller_counts_in_full(store: RunStore) -> None:
    money = budget(store, run_usd=10.0)
    money.reserve("a", machine="box", seconds=4.0)
    assert money.recover() == 1
    assert money.recover() == 0
    assert money.spent_usd() == 4.0


def test_shipped_prices_and_bad_tables(tmp_path: Path, store: RunStore) -> None:
    prices = load_prices()
    assert prices["h200"].usd_per_hour > prices["cpu-core"].usd_per_hour
    with pytest.raises(ConfigError, match="no price"):
        budget(store).cost_usd("abacus", 1.0)
    table = tmp_path / "prices.toml"
    table.write_text("[box]\nusd_per_hour = -1\nunit = 'x'\nsource = 'y'\n")
    with pytest.raises(ConfigError, match="usd_per_hour"):
        load_prices(table)


@settings(max_examples=12, deadline=None, database=None)
@given(
    cap=st.integers(1, 30),
    asked=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=12),
)
def test_no_order_of_requests_passes_a_cap(
    tmp_path_factory, cap: int, asked: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("money") / "run.db"
    with RunStore(path) as store:
        money = budget(store, run_usd=float(cap))
        for number, (seconds, took) in enumerate(asked):
            try:
                money.reserve(str(number), machine="box", seconds=seconds)
            except BudgetRefusedError:
                pass
            else:
                if number % 2:
                    money.settle(str(number), machine="box", seconds=min(took, seconds))
            total = store.money.total()
            assert total.reserved_microusd + total.spent_microusd <= cap * 1_000_000
        rows = store.money.all()
        assert total_of(rows) == (
            store.money.total().reserved_microusd + store.money.total().spent_microusd
        )


def total_of(rows) -> int:
    return sum(
        row.reserved_microusd if row.state == "reserved" else row.spent_microusd for row in rows
    )


_SUBMIT = """
import random, sys, threading
from pathlib import Path
from nestling.core.clock import SystemClock
from nestling.fleet.budget import Budget, BudgetRefusedError, Caps, Price
from nestling.store import RunStore
name = sys.argv[2]
prices = {"box": Price(usd_per_hour=3600.0, unit="one box", source="test")}
with RunStore(Path(sys.argv[1])) as store:
    money = Budget(store, clock=SystemClock(), caps=Caps(run_usd=20.0), prices=prices)
    def submit(thread):
        rng = random.Random(f"{name}{thread}")
        for number in range(6):
            key = f"{name}-{thread}-{number}"
            try:
                money.reserve(key, machine="box", seconds=rng.uniform(0.1, 1.0))
            except BudgetRefusedError:
                continue
            if rng.random() < 0.5:
                money.settle(key, machine="box", seconds=0.1)
    threads = [threading.Thread(target=submit, args=(n,)) for n in range(25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.long
def test_fifty_submitters_never_pass_the_cap(tmp_path: Path) -> None:
    """Two processes of 25 threads each; every moment is in the event log."""
    path = tmp_path / "run.db"
    with RunStore(path) as store:
        processes = [
            subprocess.Popen([sys.executable, "-c", _SUBMIT, str(path), name]) for name in "ab"
        ]
        highest = 0
        seen = threading.Event()

        def look() -> None:
            nonlocal highest
            with RunStore.open_reader(path) as reader:
                while not seen.wait(0.002):
                    total = reader.money.total()
                    highest = max(highest, total.reserved_microusd + total.spent_microusd)

        watcher = threading.Thread(target=look)
        watcher.start()
        assert [process.wait(timeout=60) for process in processes] == [0, 0]
        seen.set()
        watcher.join()
        assert highest <= 20_000_000
        used = 0
        reserved: dict[str, int] = {}
        for event in store.events.since(0, limit=100_000):
            if event.kind == "money.reserved":
                reserved[event.subject] = event.data["microusd"]
                used += event.data["microusd"]
            elif event.kind == "money.settled":
                used += event.data["spent_microusd"] - reserved[event.subject]
            assert used <= 20_000_000
        assert used > 15_000_000  # the cap was really reached
        total = store.money.total()
        assert used == total.reserved_microusd + total.spent_microusd == total_of(store.money.all())
