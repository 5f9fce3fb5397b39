"""The matrix of machine types and bases: what is measured, what is scaled, what is only a price."""

from __future__ import annotations

import random

import pytest

from nestling.bench.fleet import JobTime, cheapest, matrix, measure, prediction_error
from nestling.config import load_recipe
from nestling.core.errors import ConfigError
from nestling.fleet.budget import Price
from nestling.store.history import PastJob


def price(usd_per_hour: float) -> Price:
    return Price(usd_per_hour=usd_per_hour, unit="one", source="test")


def job(base: str, seconds: float, *, bound_s: float = 10.0, status: str = "succeeded") -> JobTime:
    return JobTime(
        family="ledger",
        base=base,
        steps=8,
        status=status,
        bound_s=bound_s,
        seconds=seconds,
        cpu_s=seconds / 2,
        usd=seconds / 3600 * 0.04,
        uplift=0.1,
    )


def past(machine: str, base: str, ratio: float) -> PastJob:
    return PastJob(
        family="ledger", base=base, machine=machine, turns=1.0, bound_s=7.0, seconds=7.0 * ratio
    )


PRICES = {"cpu-core": price(0.04), "h200": price(4.59), "a40": price(0.44), "own": price(0.0)}


def test_measured_history_and_price_are_told_apart() -> None:
    times = [job("nano", 20.0), job("nano", 40.0), job("nano", 1.0, status="failed")]
    history = {"h200": [past("h200", "nano", ratio) for ratio in (0.01, 0.02, 5.0)]}
    cells = {cell.machine: cell for cell in matrix(times, "cpu-core", PRICES, history)}
    assert (cells["cpu-core"].source, cells["cpu-core"].jobs) == ("measured", 2)
    assert cells["cpu-core"].seconds == 30.0
    assert cells["cpu-core"].usd == pytest.approx(30.0 / 3600 * 0.04)
    # The median ratio of its past jobs, on the jobs that were measured here.
    assert (cells["h200"].source, cells["h200"].seconds) == ("history", 0.2)
    assert cells["h200"].usd == pytest.approx(0.2 / 3600 * 4.59)
    assert (cells["a40"].source, cells["a40"].seconds, cells["a40"].usd) == ("price", None, None)
    found = list(cells.values())
    best = cheapest(found, "nano")
    assert best is not None
    assert best.machine == "h200"
    assert cells["a40"].break_even_s == pytest.approx(0.2 * 4.59 / 0.44, abs=0.01)
    assert cells["own"].break_even_s is None
    assert cheapest(found, "micro") is None


def test_two_past_jobs_are_not_a_history() -> None:
    history = {"h200": [past("h200", "nano", 0.1)] * 2 + [past("h200", "micro", 0.1)] * 9}
    cells = {c.machine: c for c in matrix([job("nano", 20.0)], "cpu-core", PRICES, history)}
    assert cells["h200"].source == "price"


def test_error_of_predictions() -> None:
    rng = random.Random(0)
    times = [
        job(base, 10.0 * factor * rng.lognormvariate(0.0, 0.1))
        for base, factor in (("nano", 1.0), ("micro", 3.0))
        for _ in range(40)
    ]
    found = prediction_error(times)
    assert found["jobs"] == 80
    assert 0.07 < found["wall"]["by_history"] < 0.15 < 0.4 < found["wall"]["by_bounds"]
    assert found["cpu"]["ratio_median"] == pytest.approx(
        found["wall"]["ratio_median"] / 2, abs=0.01
    )
    assert prediction_error(times[:2])["wall"]["by_bounds"] is None


def test_unknown_base_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="unknown base 'giant'"):
        measure(models=["giant"])


@pytest.mark.slow
def test_real_jobs_fill_the_matrix(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NESTLING_STATE", str(tmp_path))
    config = load_recipe(None, ["inner.eval_items=16", "inner.leak_items=0", "fleet.workers=1"])
    found = measure(config, families=["calc_chain"], models=["nano"], jobs=2)
    assert found.figures["failed"] == 0
    assert found.figures["cheapest"] == {"nano": "cpu-core"}
    assert [run["steps"] for run in found.runs] == [8, 4]
    assert found.runs[0]["seconds"] > found.runs[1]["seconds"] > 0
