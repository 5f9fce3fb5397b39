"""The workers of a run, here, on a cluster or on rented pods."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from nestling.config import LocalFleet, RayFleet, RunConfig, RunpodFleet
from nestling.core.clock import SystemClock
from nestling.core.rundir import ArtifactStore, RunDir
from nestling.families.splits import EvalSecret
from nestling.fleet.budget import Budget
from nestling.fleet.memory import memory_limits
from nestling.fleet.pool import PoolLimits
from nestling.fleet.predict import Predictor
from nestling.fleet.provider import Provider
from nestling.fleet.providers.local import LocalProvider, LocalWorkers, cores_here
from nestling.fleet.runner import FleetRunner, RunnerSettings
from nestling.fleet.slots import Slot, deal, find_gpus
from nestling.fleet.start import running_fleet
from nestling.inner.models_config import bounds_of, offered_bases
from nestling.jobs.jail import require_bubblewrap
from nestling.store import GroupCommit
from nestling.wiring.checks import refuse_distant_models, refuse_distant_stacks
from nestling.wiring.prices import worker_prices
from nestling.wiring.rooms import running_stacks, stage_seconds
from nestling.wiring.state import SECRET_FILE, make_state_folder, open_account

if TYPE_CHECKING:
    from nestling.fleet.providers.runpod import RunpodProvider
    from nestling.fleet.providers.runpod_account import PodAccount

__all__ = [
    "HANDLERS",
    "local_slots",
    "open_fleet",
    "open_pod_account",
    "open_pod_provider",
    "result_identity",
]


HANDLERS: Final = "nestling.wiring.rooms:make_handlers"


@asynccontextmanager
async def open_fleet(
    config: RunConfig, run: RunDir, writer: GroupCommit
) -> AsyncIterator[FleetRunner]:
    """The run's workers and a job runner over them."""
    refuse_distant_stacks(config)
    refuse_distant_models(config)
    with running_stacks(config, run.root / "logs") as stacks:
        async with _open_fleet(config, run, writer, stacks) as fleet:
            yield fleet


@asynccontextmanager
async def _open_fleet(
    config: RunConfig, run: RunDir, writer: GroupCommit, stacks: tuple[str, ...]
) -> AsyncIterator[FleetRunner]:
    clock = SystemClock()
    limits: PoolLimits | None = None
    if isinstance(config.fleet, RunpodFleet):
        provider: Provider = await open_pod_provider(config, run, writer)
        size = config.fleet.workers
        limits = PoolLimits(idle_s=config.fleet.idle_s, start_timeout_s=config.fleet.ready_s)
    else:
        provider, size = _open_provider(config, run, writer, stacks)
    runner_settings = RunnerSettings(
        identity=result_identity(config),
        bounds=bounds_of(config.models, config.inner.trainer),
        deadlines=stage_seconds(config),
        machine=config.fleet.machine,
        lane=provider.lane,
    )
    with open_account() as account:
        budget = Budget(
            writer.store,
            clock=clock,
            caps=config.budget,
            prices=worker_prices(config),
            account=account,
        )
        async with running_fleet(
            writer=writer,
            provider=provider,
            size=size,
            artifacts=ArtifactStore(run.root / "artifacts"),
            settings=runner_settings,
            clock=clock,
            budget=budget,
            limits=limits,
            guard=provider.guard if isinstance(provider, LocalProvider) else None,
            predictor=Predictor(account.history, config.fleet.machine),
        ) as fleet:
            yield fleet


async def open_pod_provider(config: RunConfig, run: RunDir, writer: GroupCommit) -> RunpodProvider:
    """Pods of a run whose recipe has `fleet.kind = "runpod"`; nothing is rented yet."""
    from nestling.fleet.providers.runpod_open import PodWork, open_provider

    assert isinstance(config.fleet, RunpodFleet)
    state = make_state_folder()
    secret = EvalSecret.load_or_create(state / SECRET_FILE)
    return await open_provider(
        config.fleet,
        PodWork(
            handlers=HANDLERS,
            settings={"config": config.model_dump(mode="json")},
            private={SECRET_FILE: secret.key},
        ),
        writer=writer,
        artifacts=ArtifactStore(run.root / "artifacts"),
        state=state,
        clock=SystemClock(),
    )


def open_pod_account(api_url: str) -> PodAccount:
    """The account whose key is in the environment."""
    from nestling.fleet.providers.runpod_account import PodAccount
    from nestling.fleet.providers.runpod_open import open_api

    return PodAccount(open_api(api_url, SystemClock()))


def _open_provider(
    config: RunConfig, run: RunDir, writer: GroupCommit, stacks: tuple[str, ...]
) -> tuple[Provider, int]:
    """Where workers run, and how many."""
    assert not isinstance(config.fleet, RunpodFleet)
    state = make_state_folder()
    secret = EvalSecret.load_or_create(state / SECRET_FILE)
    settings = {"config": config.model_dump(mode="json")}
    if isinstance(config.fleet, RayFleet):
        from nestling.fleet.providers.ray_cluster import RayProvider, RaySlots

        slots = RaySlots(
            handlers=HANDLERS,
            settings=settings,
            private={SECRET_FILE: secret.key},
            artifacts=ArtifactStore(run.root / "artifacts"),
            logs=run.root / "logs",
            **config.fleet.model_dump(exclude={"kind"}),
        )
        return RayProvider(slots, writer), config.fleet.workers

    if not config.unsafe_no_jail:
        require_bubblewrap()
    dealt = local_slots(config.fleet)
    workers = LocalWorkers(
        handlers=HANDLERS,
        settings=settings
        | {"run": str(run.root.resolve()), "state": str(state.resolve()), "stacks": stacks},
        logs=run.root / "logs",
        machine=config.fleet.machine,
        slots=dealt,
        memory=memory_limits(
            worker_gib=config.fleet.worker_memory_gib,
            num_workers=len(dealt),
            least_free_gib=config.fleet.least_free_gib,
        ),
    )
    return LocalProvider(workers, writer), len(dealt)


def local_slots(fleet: LocalFleet) -> list[Slot]:
    """The workers of this machine and what each has.

    Raises:
        ConfigError: more workers than its cores or GPUs have room for.
        FleetError: `gpus = "auto"` and the driver does not answer.
    """
    return deal(
        cores_here(),
        gpus=find_gpus() if fleet.gpus == "auto" else fleet.gpus,
        workers=fleet.workers,
        threads=fleet.threads,
        gpu_job_gib=fleet.gpu_job_gib,
        pin=fleet.pin_cores,
    )


_NO_RESULT: Final = {"keep", "parallel", "start_s", "request_s", "retries", "restarts"}
"""Of a server: how it is asked, not what it answers."""


def result_identity(config: RunConfig) -> dict[str, Any]:
    """Everything beside bundle and family that changes a job's result."""
    return {
        "trainer": config.inner.trainer,
        **({"stack": _stack_identity(config)} if config.inner.trainer == "stacked" else {}),
        **(
            {"openai": config.inner.openai.model_dump(mode="json", exclude=_NO_RESULT)}
            if config.inner.scorer == "openai"
            else {}
        ),
        "seed": config.inner.seed,
        "eval_items": config.inner.eval_items,
        **({} if config.inner.split == "b" else {"split": config.inner.split}),
        "bases": {
            name: base.sha256
            for name, base in offered_bases(config.models, make_state_folder()).items()
        },
        **({} if config.models.device == "cpu" else {"device": config.models.device}),
        "leak_items": config.inner.leak_items,
    }


def _stack_identity(config: RunConfig) -> dict[str, Any]:
    """What of a stack may change rounding."""
    return config.inner.stack.model_dump(
        mode="json", exclude={"processes", "max_jobs", "memory_gib"}
    )
