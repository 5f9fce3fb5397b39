"""A fleet brought up and taken down as a whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from nestling.agent.job_runner import JobRunner
from nestling.core.clock import SystemClock
from nestling.core.errors import FleetError
from nestling.core.rundir import RunDir
from nestling.fleet.budget import Budget, Caps, load_prices
from nestling.fleet.pool import PoolLimits
from nestling.fleet.providers.local import LocalProvider, LocalWorkers
from nestling.fleet.runner import FleetRunner, RunnerSettings
from nestling.fleet.start import running_fleet
from nestling.jobs.bundle import Bundle
from nestling.store import GroupCommit, RunStore
from nestling.store.jobs import LeaseRecord, NewJob

BUNDLE = Bundle.from_files({"job.toml": b'base_model = "nano"\n', "environment/__init__.py": b""})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def fleet_of(
    run: RunDir, writer: GroupCommit, handlers: str = "runner_handlers:make_handlers"
) -> AbstractAsyncContextManager[FleetRunner]:
    clock = SystemClock()
    workers = LocalWorkers(
        handlers=handlers,
        settings={"count": str(run.root / "count"), "artifacts": str(run.artifacts.folder)},
        logs=run.logs,
        environment={"PYTHONPATH": str(Path(__file__).parent)},
    )
    return running_fleet(
        writer=writer,
        provider=LocalProvider(workers, writer),
        size=1,
        artifacts=run.artifacts,
        settings=RunnerSettings(identity={}),
        clock=clock,
        budget=Budget(writer.store, clock=clock, caps=Caps(run_usd=1.0), prices=load_prices()),
        limits=PoolLimits(backoff_s=0.01, max_failed_starts=2),
    )


async def test_leftovers_are_settled_and_work_goes_on(run: RunDir) -> None:
    with run.lock(), RunStore(run.database) as store, GroupCommit(store) as writer:
        store.jobs.insert(NewJob(id="old", kind="baseline", payload={"family": "ledger"}))
        lease = {"acquired_at": 0.0, "heartbeat_at": 0.0, "acquired_mono_s": 0.0, "stage": None}
        store.jobs.start(
            store.jobs.get("old"),
            LeaseRecord(
                job_id="old",
                token="old#1",
                worker="gone",
                session="gone",
                expires_mono_s=1e12,
                **lease,
            ),
        )
        async with fleet_of(run, writer) as runner:
            outcome = await runner.run(BUNDLE, "ledger")
            assert outcome.status == "succeeded"
        assert store.jobs.counts() == {"queued": 0, "running": 0, "done": 2, "failed": 0}
        assert store.processes.all() == []
        assert store.money.total().reserved_microusd == 0


async def test_body_error_and_start_error_come_out_as_themselves(run: RunDir) -> None:
    async def broken(body: Callable[[], None], **options: str) -> None:
        with RunStore(run.database) as store, GroupCommit(store) as writer:
            async with fleet_of(run, writer, **options) as runner:
                body()
                await runner.baselines("ledger")

    def interrupt() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await broken(interrupt)
    with pytest.raises(FleetError, match="could not be started"):
        await broken(lambda: None, handlers="nowhere:nothing")


@pytest.mark.parametrize("method", ["check", "run", "baselines"])
def test_runner_has_the_shape_that_an_episode_needs(method: str) -> None:
    wanted = inspect.signature(getattr(JobRunner, method), eval_str=True)
    assert inspect.signature(getattr(FleetRunner, method), eval_str=True) == wanted
