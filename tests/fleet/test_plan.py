"""The plan of a run, its ceiling, and what it really spent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from nestling.cli.run import command
from nestling.config import RunConfig, load_recipe
from nestling.fleet.accounting import added_up
from nestling.fleet.budget import load_prices
from nestling.store import RunStore
from nestling.store.account import Account
from nestling.store.history import PastJob
from nestling.store.jobs import NewJob
from nestling.store.money import Reservation
from nestling.wiring.plans import plan_run


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NESTLING_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def config(*settings: str) -> RunConfig:
    base = ["outer.steps=5", "outer.groups_per_step=2", "outer.group_size=4", "fleet.workers=3"]
    return load_recipe(None, [*base, *settings])


def test_plan_counts_every_episode_that_the_loop_may_play() -> None:
    plan = plan_run(
        config(
            "outer.held_out.every_steps=2",
            "outer.held_out.episodes=3",
            "references.training_families=false",
            'references.arms=["noop"]',
            'families.held_out=["triage"]',
        )
    )
    most = {(one.what, one.kind): one.most_jobs for one in plan.work}
    assert most["training", "run"] == 5 * 2 * 4
    # Untrained, no-op and the checkpoints of steps 2, 4 and 5, three episodes each.
    assert most["sweeps", "run"] == (2 + 3) * 3
    attempts = RunConfig().reward.weights.max_attempts
    assert most["training", "check"] == attempts * most["training", "run"]
    assert plan.num_run_jobs == 55


def test_ceiling_is_every_deadline_at_the_price_and_a_cap_bounds_the_worst() -> None:
    plan = plan_run(config("outer.held_out.every_steps=0", "fleet.machine=h200"))
    assert {one.what for one in plan.work} == {"training", "baselines"}
    hours = sum(one.most_jobs * one.deadline_s for one in plan.work) / 3600
    assert plan.ceiling_usd == pytest.approx(hours * load_prices()["h200"].usd_per_hour)
    assert plan.worst_usd == pytest.approx(3 * plan.ceiling_usd)
    shared = config(
        "outer.held_out.every_steps=0", "fleet.machine=h200", "fleet.workers_per_machine=8"
    )
    assert plan_run(shared).ceiling_usd == pytest.approx(plan.ceiling_usd / 8)
    capped = plan_run(config("budget.run_usd=0.5", "budget.day_usd=0.1"))
    assert capped.worst_usd == 0.5
    assert capped.caps_usd == {"run_usd": 0.5, "day_usd": 0.1}
    assert "day_usd 0.1" in capped.lines()[-1]


def test_plan_tells_what_the_service_of_the_agent_may_cost() -> None:
    hosted = ("learner.kind=tinker", "learner.base_model=Qwen/Qwen3-8B")
    assert plan_run(config()).apart == ()
    [uncapped] = plan_run(config(*hosted)).apart
    assert "Qwen/Qwen3-8B" in uncapped
    assert "without a cap; set learner.max_usd" in uncapped
    capped = plan_run(config(*hosted, "learner.max_usd=10"))
    assert capped.lines()[-1].endswith("at most 10 USD (learner.max_usd)")
    assert capped.as_json()["apart"] == capped.apart


def test_past_jobs_of_the_machine_type_give_the_expectation(state: Path) -> None:
    assert plan_run(config()).expected is None
    with Account(state / "account.db") as account:
        for number, (family, seconds, machine) in enumerate(
            [
                *[("calc_chain", 10.0, "cpu-core")] * 3,
                ("ledger", 40.0, "cpu-core"),
                ("ledger", 9e3, "h200"),
            ]
        ):
            past = PastJob(
                family=family, base="nano", machine=machine, turns=1, bound_s=1, seconds=seconds
            )
            account.history.add("run", f"j{number}", past)
    plan = plan_run(config('families.training=["calc_chain", "ledger"]'))
    assert plan.expected is not None
    assert (plan.expected.seconds, plan.expected.num_jobs) == (25.0, 4)
    assert plan.expected_s == pytest.approx(plan.num_run_jobs * 25.0 / 3)
    assert json.loads(json.dumps(plan.as_json()))["expected_usd"] == plan.expected_usd


def test_dry_run_prints_plan_and_ceiling_and_starts_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = CliRunner().invoke(
        command,
        ["--dry-run", "--json", "--out", str(out), "--set", "budget.day_usd=2"],
        standalone_mode=False,
    )
    assert done.exit_code == 0
    assert "# caps: day_usd 2" in done.stdout
    assert "# ceiling: " in done.stdout
    shown = json.loads(done.stdout.splitlines()[-1])
    assert shown["plan"]["ceiling_usd"] > 0
    assert not out.exists()


def test_spending_by_machine_and_family(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run.db") as store:
        tries = [
            ("ledger", "h200", 2.0, 5_000_000, 3.0),
            ("ledger", "cpu-core", 1.0, 1_000_000, 0.0),
            ("dispatch", "cpu-core", 4.0, 2_000_000, 5.0),
        ]
        for number, (family, machine, seconds, microusd, predicted_s) in enumerate(tries):
            store.jobs.insert(
                NewJob(id=f"j{number}", kind="run", payload={}, predicted_s=predicted_s)
            )
            store.money.reserve(
                Reservation(
                    id=f"m{number}",
                    microusd=9_000_000,
                    machine=machine,
                    day="2031-01-31",
                    job_id=f"j{number}",
                    family=family,
                ),
                {},
            )
            store.money.settle(f"m{number}", microusd, seconds)
        rows = store.money.spending()
    machines = {row.machine: row for row in added_up(rows, "machine")}
    assert machines["cpu-core"].usd == 3.0
    assert (machines["cpu-core"].tries, machines["cpu-core"].seconds) == (2, 5.0)
    assert (machines["cpu-core"].predicted_s, machines["cpu-core"].predicted_took_s) == (5.0, 4.0)
    families = {row.family: row.usd for row in added_up(rows, "family")}
    assert families == {"dispatch": 2.0, "ledger": 6.0}
