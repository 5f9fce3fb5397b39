"""An episode's view: check, run and baselines through real workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nestling.core.errors import JobFailedError
from nestling.core.rundir import ArtifactStore
from nestling.fleet.budget import Budget, Caps, Price
from nestling.fleet.handlers import StageSeconds, pack_bundle, unpack_bundle
from nestling.fleet.predict import Predictor
from nestling.fleet.runner import FleetRunner, RunnerSettings
from nestling.jobs.bundle import Bundle
from nestling.store import RunStore
from nestling.store.account import Account
from nestling.store.money import Reservation


def bundle(word: str = "") -> Bundle:
    return Bundle.from_files(
        {
            "job.toml": b'base_model = "nano"\n',
            "environment/__init__.py": f"# {word}\n".encode(),
        }
    )


@pytest.fixture
def machine_room(fleet, tmp_path: Path):
    count = tmp_path / "count"
    artifacts = ArtifactStore(tmp_path / "artifacts")

    @asynccontextmanager
    async def opened(
        *,
        make_budget: Callable[[RunStore], Budget] | None = None,
        predictor: Predictor | None = None,
        seed: int = 0,
        **options,
    ):
        async with fleet(
            handlers="runner_handlers:make_handlers",
            settings={"count": str(count), "artifacts": str(artifacts.folder)},
            make_budget=make_budget,
            **options,
        ) as room:
            runner = FleetRunner(
                queue=room.queue,
                writer=room.writer,
                watch=room.watch,
                artifacts=artifacts,
                settings=RunnerSettings(
                    identity={"seed": seed},
                    deadlines=StageSeconds(check=20.0, run=20.0, baseline=20.0),
                    max_tries=2,
                ),
                budget=make_budget(room.store) if make_budget else None,
                predictor=predictor,
            )
            yield runner, room

    opened.done = lambda: count.read_text().split() if count.exists() else []
    return opened


async def test_check_run_and_baselines(machine_room) -> None:
    async with machine_room() as (runner, room):
        episode = runner.for_episode("e1", "g1")
        report = await episode.check(bundle(), "ledger")
        assert report.ok
        assert report.predicted is not None
        outcome = await episode.run(bundle(), "ledger")
        assert (outcome.status, outcome.uplift_ci, len(outcome.steps)) == (
            "succeeded",
            (0.1, 0.4),
            1,
        )
        # What the probe predicted orders the queue.
        assert [job.predicted_s for job in room.store.jobs.all(kind="run")] == [3.0]
        assert await episode.baselines("ledger") == {"nano": 0.25, "micro": 0.5}
        wrong = await episode.check(bundle("wrong"), "ledger")
        assert [problem.code for problem in wrong.problems] == ["load.x"]
        kinds = [event.kind for event in room.store.events.since(0)]
        assert "job.progress" in kinds


async def test_finished_jobs_teach_the_predictor_once(machine_room, tmp_path: Path) -> None:
    with Account(tmp_path / "account.db") as account:
        predictor = Predictor(account.history, "cpu-core")
        async with machine_room(predictor=predictor) as (runner, room):
            for word in "abca":
                assert (await runner.check(bundle(word), "ledger")).ok
                await runner.run(bundle(word), "ledger")
            past = account.history.newest(machine="cpu-core")
            assert [(one.family, one.base, one.bound_s) for one in past] == [
                ("ledger", "nano", 3.0)
            ] * 3
            assert all(0 < one.seconds < 20 for one in past)
            assert {one.turns for one in past} == {bundle().manifest().prime_rl.max_turns * 512.0}
            assert (await runner.check(bundle("d"), "ledger")).ok
            await runner.run(bundle("d"), "ledger")
            last = room.store.jobs.all(kind="run")[-1]
            ratios = sorted(one.seconds / one.bound_s for one in past)
            assert last.predicted_s == pytest.approx(3.0 * ratios[1])


@pytest.mark.long
async def test_same_work_is_done_once_also_after_a_restart(machine_room) -> None:
    async with machine_room() as (runner, _):
        async with asyncio.TaskGroup() as group:
            runs = [
                group.create_task(runner.for_episode(f"e{n}", "g").run(bundle(), "ledger"))
                for n in range(4)
            ]
        assert len({run.result().job_hash for run in runs}) == 1
        await runner.run(bundle("other"), "ledger")
        await runner.run(bundle(), "dispatch")
    async with machine_room(session="s2") as (runner, _):
        await runner.run(bundle(), "ledger")
    assert machine_room.done() == ["run"] * 3
    async with machine_room(session="s3", seed=1) as (runner, _):
        await runner.run(bundle(), "ledger")
    assert machine_room.done() == ["run"] * 4


@pytest.mark.long
async def test_job_that_kills_workers_is_an_outcome(machine_room) -> None:
    async with machine_room() as (runner, _):
        outcome = await runner.run(bundle("kill"), "ledger")
        assert (outcome.status, outcome.reason, outcome.post) == ("lost", "fleet.lost", None)
        assert outcome.base_model == "nano"
        report = await runner.check(bundle("kill"), "ledger")
        assert not report.ok
        assert report.problems[0].code == "probe.lost"


@pytest.mark.long
async def test_cancelled_wait_drops_the_job_unless_another_waits(machine_room, until) -> None:
    async with machine_room() as (runner, room):
        slow = asyncio.ensure_future(runner.run(bundle("slow"), "ledger"))
        await until(lambda: room.store.jobs.leases() != [])
        first = asyncio.ensure_future(runner.run(bundle("a"), "ledger"))
        second = asyncio.ensure_future(runner.run(bundle("a"), "ledger"))
        alone = asyncio.ensure_future(runner.run(bundle("b"), "ledger"))
        await until(lambda: len(room.store.jobs.all()) == 3)
        for task in (first, alone):
            task.cancel()
        await asyncio.wait([first, alone])

        def states(word: str) -> set[str]:
            wanted = bundle(word).job_hash
            jobs = room.store.jobs.all()
            return {job.state for job in jobs if job.payload["job_hash"] == wanted}

        # Dropped before `second` had joined, the work is queued again, as a job of its own.
        await until(lambda: not states("a").isdisjoint({"queued", "running"}))
        assert states("b") == {"failed"}
        for lease in room.store.jobs.leases():
            room.queue.fail(lease.token, "timed_out", "ended by the test", retry=False)
        assert (await slow).status == "timed_out"
        await room.provider.terminate("cpu-0")
        assert (await second).status == "succeeded"


async def test_budget_refuses_with_a_message_and_keeps_the_cap(machine_room) -> None:
    prices = {"cpu-core": Price(usd_per_hour=360.0, unit="core", source="test")}
    cap_usd = 3.5  # one job may cost (20 + 10) s at 0.1 USD

    def make_budget(store: RunStore) -> Budget:
        from nestling.core.clock import SystemClock

        return Budget(store, clock=SystemClock(), caps=Caps(run_usd=cap_usd), prices=prices)

    async with machine_room(make_budget=make_budget, size=2) as (runner, room):
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(runner.run(bundle(str(n)), "ledger")) for n in range(4)]
        reasons = {run.result().reason for run in runs}
        assert reasons <= {"", "budget.refused"}
        total = room.store.money.total()
        assert total.reserved_microusd == 0
        assert 0 < total.spent_microusd <= cap_usd * 1_000_000
        tight = Budget(room.store, clock=room.store.clock, caps=Caps(run_usd=0.0001), prices=prices)
        refused = FleetRunner(
            queue=room.queue,
            writer=room.writer,
            watch=room.watch,
            artifacts=runner._artifacts,
            settings=runner._settings,
            budget=tight,
        )
        report = await refused.check(bundle("x"), "ledger")
        assert [problem.stage for problem in report.problems] == ["budget"]


@pytest.mark.long
async def test_replayed_submit_is_not_refused_by_a_cap_reached_meanwhile(machine_room) -> None:
    prices = {"cpu-core": Price(usd_per_hour=360.0, unit="core", source="test")}

    def capped(usd: float) -> Callable[[RunStore], Budget]:
        return lambda store: Budget(store, clock=store.clock, caps=Caps(run_usd=usd), prices=prices)

    async with machine_room(make_budget=capped(100.0)) as (runner, room):
        episode = runner.for_episode("e1", "g1")
        assert (await episode.check(bundle(), "ledger")).ok
        outcome = await episode.run(bundle(), "ledger")
        room.store.money.reserve(
            Reservation(id="rest", microusd=100_000_000, machine="cpu-core", day="2031-01-01"), {}
        )
        spent = room.store.money.total()
    async with machine_room(make_budget=capped(100.0), session="s2") as (runner, room):
        resumed = runner.for_episode("e1", "g1")
        assert (await resumed.check(bundle(), "ledger")).ok
        assert await resumed.run(bundle(), "ledger") == outcome
        assert room.store.money.total() == spent
        report = await resumed.check(bundle(), "dispatch")  # other work is refused
        assert [problem.code for problem in report.problems] == ["budget.refused"]
    assert machine_room.done() == ["check", "run"]


async def test_replayed_submit_joins_a_run_that_waits(machine_room, until) -> None:
    prices = {"cpu-core": Price(usd_per_hour=360.0, unit="core", source="test")}
    cap_usd = 3.5  # one job may cost (20 + 10) s at 0.1 USD

    def make_budget(store: RunStore) -> Budget:
        return Budget(store, clock=store.clock, caps=Caps(run_usd=cap_usd), prices=prices)

    async with machine_room(make_budget=make_budget) as (runner, room):
        assert (await runner.check(bundle("slow"), "ledger")).ok
        slow = asyncio.ensure_future(runner.run(bundle("slow"), "ledger"))
        await until(lambda: room.store.jobs.leases() != [])  # its money is set aside
        other = asyncio.ensure_future(runner.check(bundle("slow"), "ledger"))
        assert (await other).ok  # the finished check is joined, the running job takes the rest
        for lease in room.store.jobs.leases():
            room.queue.fail(lease.token, "timed_out", "ended by the test", retry=False)
        assert (await slow).status == "timed_out"
        await room.provider.terminate("cpu-0")


def test_bundle_survives_the_trip(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path)
    name = pack_bundle(artifacts, bundle())
    assert pack_bundle(artifacts, bundle()) == name
    assert unpack_bundle(artifacts, name) == bundle()
    with pytest.raises(JobFailedError, match="missing"):
        unpack_bundle(artifacts, "0" * 64)
