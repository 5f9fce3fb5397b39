"""More than fits one request, and answers that nobody expects."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from nestling.core.clock import SystemClock
from nestling.core.errors import FleetError
from nestling.fleet.pods.records import PodRecords
from nestling.fleet.providers import runpod
from nestling.fleet.providers.runpod_api import PodRequest, RunpodApi
from nestling.fleet.providers.runpod_http import RunpodHttp
from nestling.fleet.providers.runpod_keeper import PodKeeper
from nestling.fleet.providers.runpod_ladder import Ladder
from nestling.fleet.providers.runpod_request import pod_command
from nestling.fleet.runpod_simulator.script import Script
from nestling.fleet.runpod_simulator.server import simulated_account
from nestling.store import GroupCommit, RunStore

from .conftest import IMAGE, fleet_config, open_pods, simulated, until


@pytest.mark.long
async def test_a_worker_may_say_a_lot_at_once(pods) -> None:
    """Several messages that each need an upload, and many that together are above one body."""
    sizes = [600_000] * 3 + [500_000] * 12
    async with pods(fleet={"workers": 1}) as room:
        done = await room.do("chatty", {"sizes": sizes})
        assert (done.state, done.result, done.tries) == ("done", len(sizes), 1)


@asynccontextmanager
async def watched(folder: Path, *faults: dict) -> AsyncIterator[tuple]:
    """Account, API, records and keeper of a run with two pods, a and b."""
    clock = SystemClock()
    script = Script.model_validate({"boot_s": 1e5, "request": faults})
    async with simulated_account(script, folder, key="the-key") as app:
        http = RunpodHttp(
            "http://127.0.0.1/v2",
            SecretStr("the-key"),
            clock,
            transport=httpx.ASGITransport(app=app),
            rng=random.Random(0),
        )
        api = RunpodApi(http)
        config = fleet_config("https://api.example/v2", grace_s=0, tick_s=0.01)
        ids = dict.fromkeys(("a5000", "a40", "rtx4090", "a6000"), "G")
        with RunStore(folder / "run.db", clock=clock) as store, GroupCommit(store) as writer:
            records = PodRecords(writer, clock)
            keeper = PodKeeper(
                api=api,
                ladder=Ladder(config.ladder, ids, clock),
                records=records,
                config=config,
                prefix="nestling-1-",
                clock=clock,
                request=lambda name, step: None,
                heard_s=lambda name: None,
                lost=lambda name, why: None,
            )
            for name in ("nestling-1-a", "nestling-1-b"):
                request = PodRequest(
                    name=name, image=IMAGE, gpu_id="NVIDIA A40", command=pod_command(())
                )
                await records.want(name, gpu="a40", cloud="SECURE", usd_per_hour=0.6)
                pod = await api.create_pod(request, limit_s=5.0)
                await records.made(name, pod_id=pod.id, usd_per_hour=0.6)
            yield app.account, api, records, keeper
        await http.close()


async def test_one_look_that_is_refused_leaves_the_others_their_watch(tmp_path: Path) -> None:
    refusal = {"route": "get", "do": "status", "status": 403}
    async with watched(tmp_path, refusal) as (account, api, records, keeper):
        await api.delete_pod(records.get("nestling-1-a").pod_id)
        await records.ending("nestling-1-a", "it is gone, but its address does not say so")
        account.pods[records.get("nestling-1-b").pod_id].forced = "EXITED"
        await keeper.tick()
        assert records.get("nestling-1-a").state == "ending"  # not proved gone
        assert records.get("nestling-1-b").state == "ending"  # seen all the same


@pytest.mark.long
async def test_an_api_that_stands_still_does_not_hold_the_end_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pods are named in time; they end themselves, or `fleet down` does."""
    monkeypatch.setattr(runpod, "_CLOSE_S", 0.5)
    stuck = [
        {"route": route, "do": "stall", "after_s": 3000.0, "seconds": 3000.0}
        for route in ("list", "delete")
    ]
    async with (
        simulated(tmp_path, request=stuck) as simulator,
        open_pods(tmp_path, None, closes=False, simulator=simulator, workers=1) as room,
    ):
        assert (await room.do("echo", {"n": 1})).state == "done"
        [pod] = room.account.live_pods()
        room.account.time.advance(3000.0)
        async with asyncio.timeout(15):
            with pytest.raises(FleetError, match=f"pods {pod.name} are not proved gone"):
                await room.provider.close()


async def test_a_defect_of_ours_does_not_end_the_watch_over_paid_pods(tmp_path: Path) -> None:
    async with watched(tmp_path) as (account, api, records, keeper):
        looks, list_pods = [], api.list_pods

        async def breaks_once() -> list:
            looks.append(1)
            if len(looks) == 1:
                raise KeyError("a defect")
            return await list_pods()

        api.list_pods = breaks_once
        account.pods[records.get("nestling-1-b").pod_id].forced = "EXITED"
        watch = asyncio.ensure_future(keeper.run())
        await until(lambda: watch.done() or records.get("nestling-1-b") is None)
        assert not watch.done()
        watch.cancel()
        await asyncio.wait([watch])
