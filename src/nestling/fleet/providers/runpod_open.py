"""From a recipe's `[fleet]` table to a provider, and to plain looks at an account."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr

from nestling.core.clock import Clock
from nestling.core.errors import ConfigError
from nestling.core.rundir import ArtifactStore
from nestling.fleet.budget import load_prices
from nestling.fleet.pods.config import RunpodFleet
from nestling.fleet.pods.identity import PodIdentity
from nestling.fleet.pods.pins import expected_pins
from nestling.fleet.pods.records import PodRecords
from nestling.fleet.pods.wire import PodLimits, WorkSpec
from nestling.fleet.providers.runpod import RunpodProvider
from nestling.fleet.providers.runpod_api import RunpodApi
from nestling.fleet.providers.runpod_http import RunpodHttp
from nestling.fleet.providers.runpod_ladder import Ladder
from nestling.fleet.providers.runpod_request import PodRun
from nestling.store import GroupCommit

__all__ = ["KEY_VARIABLE", "PodWork", "open_api", "open_provider"]

KEY_VARIABLE = "RUNPOD_API_KEY"

_SELF_FACTOR = 1.5
"""A pod waits so much longer than its controller before it ends itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodWork:
    """What workers on pods run."""

    handlers: str
    """`module:function` that makes the handlers."""
    settings: Mapping[str, Any]
    """JSON for that function: the recipe, with its choice of trainer and scorer. No secrets."""
    private: Mapping[str, bytes]
    """Secret files of the worker's state folder, by name; only sent to enrolled pods."""
    beat_s: float = 5.0


def open_api(
    api_url: str, clock: Clock, *, transport: httpx.AsyncBaseTransport | None = None
) -> RunpodApi:
    """The account whose key is in RUNPOD_API_KEY; `ConfigError` when there is none."""
    key = SecretStr(os.environ.get(KEY_VARIABLE, ""))
    return RunpodApi(RunpodHttp(api_url, key, clock, transport=transport))


async def open_provider(
    config: RunpodFleet,
    work: PodWork,
    *,
    writer: GroupCommit,
    artifacts: ArtifactStore,
    state: Path,
    clock: Clock,
    transport: httpx.AsyncBaseTransport | None = None,
) -> RunpodProvider:
    """A provider for one run; nothing is asked of the account yet.

    Raises `ConfigError` without a key or without the extra `runpod`.
    """
    api = open_api(config.api_url, clock, transport=transport)
    records = PodRecords(writer, clock)
    run_id = await records.run_id()
    spec = WorkSpec(
        handlers=work.handlers,
        settings=dict(work.settings),
        private=dict(work.private),
        beat_s=work.beat_s,
        limits=PodLimits(
            idle_s=_SELF_FACTOR * config.idle_s + config.ready_s,
            lost_controller_s=config.lost_controller_s,
            max_age_s=_SELF_FACTOR * config.max_age_s,
        ),
    )
    return RunpodProvider(
        config=config,
        run=PodRun(
            run_id=run_id,
            identity=PodIdentity.load_or_create(state / "pods" / run_id),
            spec=spec,
            pins=expected_pins(config.pins),
        ),
        api=api,
        ladder=Ladder(config.ladder, _gpu_ids([rung.gpu for rung in config.ladder]), clock),
        records=records,
        artifacts=artifacts,
        clock=clock,
    )


def _gpu_ids(names: Sequence[str]) -> dict[str, str]:
    """What the API calls the machines of the price table."""
    prices = load_prices()
    for name in names:
        if name not in prices or not prices[name].gpu:
            raise ConfigError(f"{name!r} has no gpu in the price table; add its id there")
    return {name: prices[name].gpu for name in names}
