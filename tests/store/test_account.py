"""Money and times that all runs of a state folder share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nestling.core.errors import StoreError
from nestling.store import RunStore
from nestling.store.account import Account
from nestling.store.history import PastJob
from nestling.store.ledger import OpenReservation


def held(name: str, microusd: int, day: str = "2031-01-31") -> OpenReservation:
    return OpenReservation(id=name, day=day, microusd=microusd)


def test_day_counts_all_runs_and_no_other_day(tmp_path: Path) -> None:
    with Account(tmp_path / "account.db") as account:
        ledger = account.ledger
        assert ledger.reserve("one", held("a", 60), 100) is None
        assert ledger.reserve("one", held("a", 60), 100) is None  # the same again
        refusal = ledger.reserve("two", held("a", 50), 100)
        assert refusal is not None
        assert (refusal.scope, refusal.used_microusd, refusal.asked_microusd) == (
            "day:2031-01-31",
            60,
            50,
        )
        assert ledger.reserve("two", held("b", 50, "2031-02-01"), 100) is None
        ledger.settle("one", "a", 20)
        ledger.settle("one", "a", 90)  # settled once
        assert ledger.reserve("two", held("a", 80), 100) is None
        total = ledger.total("2031-01-31")
        assert (total.reserved_microusd, total.spent_microusd) == (80, 20)
        assert ledger.total("2031-01-31", "one").spent_microusd == 20
        assert [one.id for one in ledger.open_of("two")] == ["a", "b"]


def test_past_jobs_newest_first_and_once(tmp_path: Path) -> None:
    def past(seconds: float, base: str = "nano") -> PastJob:
        return PastJob(
            family="ledger", base=base, machine="cpu-core", turns=3.0, bound_s=2.0, seconds=seconds
        )

    class Clock:
        wall_s = 0.0

        def now(self) -> float:
            self.wall_s += 1
            return self.wall_s

        def monotonic(self) -> float:
            return 0.0

    with Account(tmp_path / "account.db", clock=Clock()) as account:
        for number in range(4):
            account.history.add("run", f"j{number}", past(1.0 + number))
        account.history.add("run", "j0", past(99.0))
        account.history.add("run", "other", past(7.0, "micro"))
        found = account.history.newest(machine="cpu-core", base="nano", family="ledger", limit=3)
        assert [one.seconds for one in found] == [4.0, 3.0, 2.0]
        assert len(account.history.newest(machine="cpu-core")) == 5
        assert account.history.machines() == ["cpu-core"]


def test_a_run_store_is_no_account(tmp_path: Path) -> None:
    RunStore(tmp_path / "run.db").close()
    with pytest.raises(StoreError, match="no account file"):
        Account(tmp_path / "run.db")


_OPEN_AND_RESERVE = """
import sys
from pathlib import Path
from nestling.store.account import Account
from nestling.store.ledger import OpenReservation
sys.stdin.read(1)  # all begin together
with Account(Path(sys.argv[1])) as account:
    held = OpenReservation(id="a", day="2031-01-31", microusd=1)
    assert account.ledger.reserve(sys.argv[2], held, None) is None
"""


@pytest.mark.long
def test_many_processes_may_make_the_file_at_the_same_moment(tmp_path: Path) -> None:
    path = tmp_path / "account.db"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _OPEN_AND_RESERVE, str(path), f"run{number}"],
            stdin=subprocess.PIPE,
        )
        for number in range(8)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(60) for process in processes] == [0] * 8
    with Account(path) as account:
        assert account.ledger.total("2031-01-31").reserved_microusd == 8
