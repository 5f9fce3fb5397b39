"""Predictions follow from bounds, then from what such jobs took."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.fleet.predict import JobShape, Predictor
from nestling.store.account import Account


@pytest.fixture
def account(tmp_path: Path) -> Iterator[Account]:
    with Account(tmp_path / "account.db") as opened:
        yield opened


def shape(bound_s: float | None, *, family: str = "ledger", base: str = "nano") -> JobShape:
    return JobShape(family=family, base=base, turns=100.0, bound_s=bound_s)


def test_bounds_stand_until_three_jobs_have_run(account: Account) -> None:
    predictor = Predictor(account.history, "cpu-core")
    assert predictor.predict(shape(None)).source == "nothing"
    for number in range(2):
        predictor.remember("run", f"j{number}", shape(10.0), 20.0)
        assert predictor.predict(shape(5.0)).seconds == 5.0
    predictor.remember("run", "j2", shape(10.0), 30.0)
    found = predictor.predict(shape(5.0))
    assert (found.seconds, found.source, found.num_jobs) == (10.0, "history", 3)
    assert predictor.predict(shape(None)).seconds == pytest.approx(20.0)


def test_nearest_kin_count_and_other_machines_do_not(account: Account) -> None:
    predictor = Predictor(account.history, "cpu-core")
    for number in range(3):
        predictor.remember("run", f"a{number}", shape(10.0), 20.0)
        predictor.remember("run", f"b{number}", shape(10.0, family="dispatch"), 30.0)
    assert predictor.predict(shape(1.0)).seconds == 2.0
    assert predictor.predict(shape(1.0, family="dispatch")).seconds == 3.0
    assert predictor.predict(shape(1.0, family="new")).seconds == 2.5
    assert predictor.predict(shape(1.0, family="new", base="micro")).seconds == 2.5
    assert Predictor(account.history, "h200").predict(shape(1.0)).source == "bounds"


def test_what_teaches_nothing_is_left_out(account: Account) -> None:
    predictor = Predictor(account.history, "cpu-core")
    predictor.remember("run", "unprobed", shape(None), 5.0)
    predictor.remember("run", "clock went back", shape(5.0), -3.0)
    assert account.history.newest(machine="cpu-core") == []


@settings(max_examples=20, deadline=None, database=None)
@given(stray=st.floats(0.01, 100.0), true=st.floats(0.2, 5.0))
def test_no_single_job_moves_a_prediction_out_of_the_others_range(
    tmp_path_factory, stray: float, true: float
) -> None:
    with Account(tmp_path_factory.mktemp("past") / "account.db") as account:
        predictor = Predictor(account.history, "cpu-core")
        for number, ratio in enumerate((true, 1.1 * true, stray)):
            predictor.remember("run", f"j{number}", shape(10.0), 10.0 * ratio)
        assert true * 0.999 <= predictor.predict(shape(1.0)).seconds <= 1.1 * true * 1.001


def test_five_jobs_of_different_sizes_give_a_line_that_one_stray_does_not_bend(
    account: Account,
) -> None:
    predictor = Predictor(account.history, "cpu-core")
    for number, bound_s in enumerate((10.0, 20.0, 30.0, 40.0)):
        predictor.remember("run", f"j{number}", shape(bound_s), 6.0 + 0.5 * bound_s)
    # Four: the median of 1.1, 0.8, 0.7 and 0.65.
    assert predictor.predict(shape(100.0)).seconds == pytest.approx(75.0)
    predictor.remember("run", "j4", shape(50.0), 6.0 + 0.5 * 50.0)
    assert predictor.predict(shape(100.0)).seconds == pytest.approx(56.0)
    assert predictor.predict(shape(2.0)).seconds == pytest.approx(7.0)
    predictor.remember("run", "stray", shape(25.0), 500.0)
    assert predictor.predict(shape(100.0)).seconds == pytest.approx(56.0, rel=0.05)


def test_a_line_that_goes_down_is_not_believed(account: Account) -> None:
    predictor = Predictor(account.history, "cpu-core")
    for number, bound_s in enumerate((10.0, 20.0, 30.0, 40.0, 50.0)):
        predictor.remember("run", f"j{number}", shape(bound_s), 60.0 - bound_s)
    assert predictor.predict(shape(60.0)).seconds == pytest.approx(60.0)


def test_a_past_makes_predictions_better(account: Account) -> None:
    """Half as fast as the bounds suppose, 5 s to start, times that scatter by 10 %."""
    rng = random.Random(0)
    predictor = Predictor(account.history, "cpu-core")
    wrong_before, wrong_after = [], []
    for number in range(60):
        bound_s = rng.lognormvariate(3.0, 0.8)
        took_s = (5.0 + 2.0 * bound_s) * rng.lognormvariate(0.0, 0.1)
        wrong_before.append(abs(bound_s / took_s - 1))
        wrong_after.append(abs(predictor.predict(shape(bound_s)).seconds / took_s - 1))
        predictor.remember("run", f"j{number}", shape(bound_s), took_s)
    assert fmean(wrong_after[10:]) < 0.15 < 0.4 < fmean(wrong_before)
