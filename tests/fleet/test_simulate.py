"""The simulated fleet: real queue, pool and store, virtual time."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from nestling.cli.fleet import command
from nestling.core.errors import ConfigError
from nestling.fleet.simulate import Simulation, simulate
from nestling.fleet.simulate_loop import VirtualClock, VirtualTimeLoop
from nestling.fleet.simulate_schedule import best_found_s, list_schedule_s, lower_bound_s
from nestling.fleet.simulate_seeds import simulate_seeds
from nestling.fleet.simulate_workers import Hazards
from nestling.store import RunStore


def best_possible_s(lengths: list[float], workers: int) -> float:
    """Every assignment, tried."""
    return min(
        max(
            sum(length for length, owner in zip(lengths, owners, strict=True) if owner == w)
            for w in range(workers)
        )
        for owners in itertools.product(range(workers), repeat=len(lengths))
    )


def test_bound_is_below_every_schedule_and_often_reached() -> None:
    rng, reached, improved, exact = random.Random(0), 0, 0, 0
    for _ in range(60):
        workers = rng.randint(1, 3)
        lengths = [rng.lognormvariate(3, 0.6) for _ in range(rng.randint(1, 7))]
        bound, best = lower_bound_s(lengths, workers), best_possible_s(lengths, workers)
        assert bound <= best * (1 + 1e-12)
        longest_first = list_schedule_s(sorted(lengths, reverse=True), workers)
        found = best_found_s(lengths, workers)
        assert best <= found * (1 + 1e-12)
        assert found <= longest_first * (1 + 1e-12)
        reached += bound > best * 0.999
        improved += found < longest_first * 0.999
        exact += found < best * 1.001
    assert reached > 20
    assert improved > 0
    assert exact > 50


def test_an_hour_of_waiting_takes_no_time_and_keeps_its_order() -> None:
    order: list[tuple[str, float]] = []

    async def wait(name: str, seconds: float, clock: VirtualClock) -> None:
        await asyncio.sleep(seconds)
        order.append((name, clock.monotonic()))

    async def play() -> None:
        clock = VirtualClock(asyncio.get_running_loop())
        async with asyncio.TaskGroup() as group:
            group.create_task(wait("late", 3600.0, clock))
            group.create_task(wait("early", 60.0, clock))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(7200.0):
                    await asyncio.Event().wait()

    started = time.perf_counter()
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(play())
    assert time.perf_counter() - started < 60
    assert order == [("early", 60.0), ("late", 3600.0)]


@pytest.mark.long
def test_forty_jobs_on_sixteen_workers_with_exact_predictions() -> None:
    """Longest first is what the pool really does: it ends when that schedule ends."""
    for seed, groups in ((1, 1), (2, 5)):
        report = simulate(
            Simulation(
                num_jobs=40, num_workers=16, seed=seed, num_groups=groups, prediction_sigma=0.0
            )
        )
        assert report.makespan_s == pytest.approx(report.longest_first_s)
        assert report.efficiency <= 1.0
        assert (report.lost, report.duplicated, report.gave_up, report.retries) == (0, 0, 0, 0)
        assert report.job_events == 120


@pytest.mark.long
def test_order_of_arrival_is_worse_than_longest_first() -> None:
    sizes = {"num_jobs": 40, "num_workers": 16, "seed": 3}
    blind = simulate(Simulation(**sizes, prediction_sigma=None))
    informed = simulate(Simulation(**sizes, prediction_sigma=0.2))
    assert informed.efficiency > blind.efficiency


@pytest.mark.long
def test_deaths_silence_and_stragglers_lose_nothing(tmp_path: Path) -> None:
    hazards = Hazards(
        deaths_per_minute=0.1, silent_share=0.3, straggler_share=0.1, restart_s=5.0, seed=4
    )
    report = simulate(
        Simulation(num_jobs=200, num_workers=24, num_groups=7, hazards=hazards, max_tries=1000),
        tmp_path,
    )
    assert (report.lost, report.duplicated, report.gave_up) == (0, 0, 0)
    assert report.deaths == report.retries > 30
    assert report.makespan_s > report.lower_bound_s
    with RunStore.open_reader(tmp_path / "run.db") as store:
        assert [job.result for job in store.jobs.all()] == [{"n": n} for n in range(200)]
        assert store.jobs.leases() == []
        reasons = [e.data["reason"] for e in store.events.since(0, 100_000) if "requeued" in e.kind]
        assert set(reasons) == {"lost"}
        assert store.money.total().reserved_microusd == 0


def test_jobs_that_die_too_often_are_given_up_and_counted() -> None:
    hazards = Hazards(deaths_per_minute=0.9, seed=5)
    report = simulate(Simulation(num_jobs=12, num_workers=4, hazards=hazards, max_tries=2))
    assert report.gave_up > 0
    assert (report.lost, report.duplicated) == (0, 0)


def test_command_prints_one_json_object() -> None:
    done = CliRunner().invoke(
        command, ["simulate", "--jobs", "12", "--workers", "4", "--json"], standalone_mode=False
    )
    assert done.exit_code == 0
    fields = json.loads(done.stdout.splitlines()[-1])
    assert {
        "efficiency",
        "makespan_s",
        "lower_bound_s",
        "lost",
        "duplicated",
        "controller_cpu_ms_per_event",
        "peak_rss_mib",
    } <= set(fields)
    assert (fields["lost"], fields["duplicated"]) == (0, 0)


@pytest.mark.long
def test_seeds_bracket_the_best_possible_schedule() -> None:
    report = simulate_seeds(Simulation(num_jobs=20, num_workers=8), 4)
    assert report.of_bound.mean <= report.of_best_found.mean <= 1.0
    assert report.of_bound.worst <= report.of_bound.tenth_percentile
    single = simulate(Simulation(num_jobs=20, num_workers=8, seed=2, hazards=Hazards(seed=2)))
    assert report.of_bound.worst <= single.efficiency + 1e-4
    done = CliRunner().invoke(
        command,
        ["simulate", "--jobs", "8", "--workers", "4", "--seeds", "2", "--json"],
        standalone_mode=False,
    )
    assert json.loads(done.stdout.splitlines()[-1])["seeds"] == 2


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        simulate(Simulation(num_jobs=0, num_workers=1))
    with pytest.raises(ConfigError, match="below 1"):
        simulate(Simulation(num_jobs=1, num_workers=1, hazards=Hazards(deaths_per_minute=1.0)))
