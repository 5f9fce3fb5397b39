"""The parts of the provider, each alone."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from nestling.config import load_recipe
from nestling.core.errors import ConfigError, FleetError
from nestling.fleet.messages import Done, Ready, Work, encode
from nestling.fleet.pods.channel import listening_socket
from nestling.fleet.pods.link import PodLink
from nestling.fleet.pods.pins import drift, expected_pins, found_pins
from nestling.fleet.pods.records import PodRecords
from nestling.fleet.pods.wire import ChildGone, Outbox, Said
from nestling.fleet.providers.runpod_api import Gpu, PodRequest, RunpodApi
from nestling.fleet.providers.runpod_errors import (
    AccessError,
    DefectError,
    KeyRefusedError,
    MissingError,
    NoCreditError,
    RefusedError,
    UncertainError,
)
from nestling.fleet.providers.runpod_http import RunpodHttp
from nestling.fleet.providers.runpod_ladder import Ladder
from nestling.fleet.providers.runpod_limits import RateLimits
from nestling.fleet.providers.runpod_open import open_api
from nestling.fleet.providers.runpod_request import pod_command
from nestling.fleet.runpod_simulator.script import Script
from nestling.fleet.runpod_simulator.server import simulated_account
from nestling.store import GroupCommit, RunStore
from nestling.wiring.checks import check_names

from .conftest import IMAGE, fleet_config

REPO = Path(__file__).parents[2]


class HandClock:
    def __init__(self) -> None:
        self.s = 1000.0

    def now(self) -> float:
        return self.s

    def monotonic(self) -> float:
        return self.s


def config(**settings):
    return fleet_config("https://api.example/v2", **settings)


# --- rate limits ---------------------------------------------------------------------------------


def test_rate_limits_slow_us_down_and_hold_us_back() -> None:
    clock = HandClock()
    limits = RateLimits(clock)
    assert (limits.wait_s(), limits.pace_s(12.0)) == (0.0, 12.0)
    policy = {"ratelimit-policy": '"minute";q=60;w=60, "hour";q=3000;w=3600'}
    limits.note(policy | {"ratelimit": '"minute";r=50;t=30, "hour";r=2900;t=3000'})
    assert limits.pace_s(12.0) == 12.0
    limits.note(policy | {"ratelimit": '"minute";r=50;t=30, "hour";r=100;t=3000'})
    assert limits.pace_s(12.0) == 30.0  # 100 requests for 3000 s
    limits.note(policy | {"ratelimit": '"minute";r=0;t=30, "hour";r=100;t=3000'})
    assert limits.wait_s() == 30.0
    clock.s += 31
    assert limits.wait_s() == 0.0


@given(st.text(max_size=60), st.text(max_size=60))
def test_rate_limit_headers_of_any_kind_are_survived(policy: str, state: str) -> None:
    limits = RateLimits(HandClock())
    limits.note({"ratelimit-policy": policy, "ratelimit": state})
    assert limits.wait_s() >= 0.0
    assert limits.pace_s(12.0) >= 12.0


# --- ladder --------------------------------------------------------------------------------------


def ladder(clock: HandClock) -> Ladder:
    ids = {"a5000": "G1", "a40": "G2", "rtx4090": "G3", "a6000": "G4"}
    return Ladder(config().ladder, ids, clock)


def test_ladder_prefers_cools_down_and_comes_back() -> None:
    clock = HandClock()
    rungs = ladder(clock)
    first, second, *_ = rungs.candidates()
    assert (first.gpu_id, second.gpu_id) == ("G1", "G2")
    rungs.cool(first, 60.0, "no stock")
    assert rungs.candidates()[0].gpu_id == "G2"
    assert not rungs.all_refused()
    for step in rungs.candidates():
        rungs.cool(step, 60.0, "no stock")
    assert rungs.all_refused()
    assert rungs.candidates() == []
    assert rungs.next_in_s() == 60.0
    clock.s += 61
    assert rungs.candidates()[0].gpu_id == "G1"
    rungs.worked()
    assert not rungs.all_refused()


def test_ladder_leaves_out_what_is_dear_empty_or_closed() -> None:
    rungs = ladder(HandClock())

    def gpu(name: str, usd: float, stock: str) -> Gpu:
        from nestling.fleet.providers.runpod_api import _Price

        return Gpu(id=name, price=_Price(secure=usd), availability=stock)

    rungs.note_catalog("SECURE", [gpu("G1", 9.0, "HIGH"), gpu("G2", 0.1, "NONE")])
    assert [step.gpu_id for step in rungs.candidates()] == ["G3", "G4"]
    rungs.note_catalog("SECURE", [gpu("G1", 0.1, "LOW"), gpu("G2", 0.1, "LOW")])
    assert len(rungs.candidates()) == 4
    for step in rungs.candidates():
        rungs.close(step, "no access")
    assert rungs.next_in_s() is None


# --- http ----------------------------------------------------------------------------------------

KEY = SecretStr("the-key")


async def api_of(stack, folder: Path, clock, **script) -> tuple[RunpodApi, object]:
    settings = Script.model_validate({"boot_s": 1e5} | script)
    app = await stack.enter_async_context(simulated_account(settings, folder, key="the-key"))
    http = RunpodHttp(
        "http://127.0.0.1/v2",
        KEY,
        clock,
        transport=httpx.ASGITransport(app=app),
        rng=random.Random(0),
    )
    stack.push_async_callback(http.close)
    return RunpodApi(http), app


@pytest.fixture
async def api(tmp_path: Path):
    from contextlib import AsyncExitStack

    from nestling.core.clock import SystemClock

    async with AsyncExitStack() as stack:

        async def start(**script):
            return await api_of(stack, tmp_path, SystemClock(), **script)

        yield start


REQUEST = PodRequest(name="n", image=IMAGE, gpu_id="NVIDIA A40", command=pod_command(()))


async def test_pods_through_the_client(api) -> None:
    client, app = await api(page=1)
    made = [await client.create_pod(REQUEST, limit_s=5.0) for _ in range(3)]
    assert [pod.id for pod in await client.list_pods()] == [pod.id for pod in reversed(made)]
    assert await client.delete_pod(made[0].id)
    assert not await client.delete_pod(made[0].id)
    assert await client.get_pod(made[0].id) is None
    await client.keep_secret("s_1", "one")
    await client.keep_secret("s_1", "two")
    assert list(app.account.secrets.values()) == [("s_1", "two")]
    await client.drop_secrets("s_")
    assert app.account.secrets == {}
    [a40] = [gpu for gpu in await client.gpus("COMMUNITY") if gpu.id == "NVIDIA A40"]
    assert a40.usd_per_hour("COMMUNITY") == 0.35


async def test_reads_are_repeated_and_creates_are_not(api) -> None:
    faults = [
        {"route": "list", "nth": [1], "do": "status", "status": 502},
        {"route": "create", "nth": [1], "do": "status", "status": 503},
    ]
    client, app = await api(request=faults)
    assert await client.list_pods() == []
    assert app.seen.statuses[502] == 1
    with pytest.raises(UncertainError, match="503"):
        await client.create_pod(REQUEST, limit_s=5.0)
    assert app.seen.statuses[503] == 1
    assert await client.list_pods() == []


async def test_a_create_that_takes_too_long_is_uncertain(api) -> None:
    client, _ = await api(request=[{"route": "create", "nth": [1], "do": "stall", "seconds": 30}])
    with pytest.raises(UncertainError, match="no answer within"):
        await client.create_pod(REQUEST, limit_s=0.05)


@pytest.mark.long
async def test_429_is_waited_out_also_for_creates(api) -> None:
    """Nothing was done, so a create may be repeated; after as long as the answer says."""
    client, app = await api(per_minute=1)
    app.account.time.advance(59.5)
    await client.list_pods()
    client.http.limits.windows.clear()  # as if another program had used the quota up
    assert (await client.create_pod(REQUEST, limit_s=5.0)).name == "n"
    assert app.seen.statuses[429] == 1
    assert len(app.account.pods) == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RefusedError),
        (401, KeyRefusedError),
        (402, NoCreditError),
        (403, AccessError),
        (404, MissingError),
        (413, DefectError),
        (422, DefectError),
        (500, UncertainError),
    ],
)
async def test_errors_by_kind(api, status: int, kind: type) -> None:
    client, _ = await api(request=[{"route": "create", "do": "status", "status": status}])
    with pytest.raises(kind) as caught:
        await client.create_pod(REQUEST, limit_s=5.0)
    assert len(caught.value.request_id) == 32
    assert "the-key" not in str(caught.value)


def test_no_key_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNPOD_API_KEY")
    with pytest.raises(ConfigError, match="RUNPOD_API_KEY"):
        open_api("https://api.example/v2", HandClock())


# --- link ----------------------------------------------------------------------------------------


def said(message, generation: int = 1) -> Said:
    import msgspec

    return Said(generation=generation, message=msgspec.Raw(encode(message)[4:]))


async def test_messages_arrive_once_and_in_order_whatever_is_repeated() -> None:
    link = PodLink("p", "life", HandClock())
    for first, count in ((1, 2), (1, 2), (2, 3), (3, 1), (5, 1)):
        items = [said(Done(token=f"t{first + n}", result=first + n)) for n in range(count)]
        link.take(Outbox(first=first, items=items))
    heard = [await link.receive() for _ in range(5)]
    assert [message.result for message in heard] == [1, 2, 3, 4, 5]


async def test_what_waits_is_kept_until_it_has_arrived() -> None:
    link = PodLink("p", "life", HandClock())
    for number in range(3):
        link.tell(Work(token="t", job_id=f"j{number}", kind="k", payload={}))
    first = await link.inbox(0, 1.0)
    assert [item.seq for item in first.items] == [1, 2, 3]
    assert [item.seq for item in (await link.inbox(0, 1.0)).items] == [1, 2, 3]
    assert [item.seq for item in (await link.inbox(2, 1.0)).items] == [3]
    assert (await link.inbox(3, 0.01)).items == []


async def test_a_worker_that_was_replaced_is_not_heard() -> None:
    link = PodLink("p", "life", HandClock())
    link.take(Outbox(first=1, items=[said(Ready(pid=1)), ChildGone(generation=1, words="bang")]))
    assert isinstance(await link.receive(), Ready)
    with pytest.raises(FleetError, match="worker process ended"):
        await link.receive()
    assert link.words == "bang"
    asking = asyncio.ensure_future(link.inbox(0, 5.0))
    await asyncio.sleep(0)
    assert link.is_parked  # a pod without a worker does not ask again and again
    link.restart()
    assert len((await asking).items) == 1
    link.take(Outbox(first=3, items=[said(Done(token="t", result=1)), said(Ready(pid=2), 2)]))
    message = await link.receive()
    assert isinstance(message, Ready)
    assert message.pid == 2


def test_uploads_go_on_where_they_broke_off_and_are_checked() -> None:
    import hashlib

    link = PodLink("p", "life", HandClock())
    data = bytes(range(256)) * 10
    digest = hashlib.sha256(data).hexdigest()
    assert link.add_piece(digest, 0, len(data), data[:1000]) == 1000
    assert link.add_piece(digest, 0, len(data), data[:1000]) == 1000  # repeated
    assert link.add_piece(digest, 2000, len(data), data[2000:]) == 1000  # a gap
    assert link.add_piece(digest, 1000, len(data), data[1000:]) == len(data)
    wrong = "0" * 64
    with pytest.raises(FleetError, match="damaged"):
        link.add_piece(wrong, 0, 4, b"abcd")
    with pytest.raises(FleetError, match="at most"):
        link.add_piece(wrong, 0, 10**9, b"")


# --- pins, records, config -----------------------------------------------------------------------


def test_pins_name_what_differs() -> None:
    expected = expected_pins({"verifiers": "0.4.0", "no-such-package": "1"})
    found = found_pins(expected)
    assert drift(expected, found) == ["no-such-package is missing; expected 1"]
    assert len(drift(expected, {})) == len(expected)


async def test_records_outlive_their_writer(tmp_path: Path) -> None:
    clock = HandClock()
    with RunStore(tmp_path / "run.db", clock=clock) as store, GroupCommit(store) as writer:
        records = PodRecords(writer, clock)
        run_id = await records.run_id()
        await records.want("a", gpu="a40", cloud="SECURE", usd_per_hour=0.6)
        await records.want("b", gpu="a40", cloud="SECURE", usd_per_hour=0.6)
        await records.made("a", pod_id="1", usd_per_hour=0.36)
        clock.s += 3600
        again = PodRecords(writer, clock)
        assert await again.run_id() == run_id
        assert {record.name: record.state for record in again.all()} == {"a": "made", "b": "wanted"}
        assert again.spent_usd() == pytest.approx(0.36)
        await again.ending("a", "first")
        await again.ending("a", "second")
        assert again.get("a").why == "first"
        await again.gone("a")
        await again.gone("b")
        await again.gone("b")
        assert again.all() == []
        assert again.sums().spent_usd == {"a40": pytest.approx(0.36)}
        assert PodRecords(writer, clock).spent_usd() == pytest.approx(0.36)
        with pytest.raises(FleetError, match="no pod 'c'"):
            await again.ready("c", "life")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"image": "nestling:latest"}, "not pinned"),
        ({"install": ["verifiers"]}, "not pinned"),
        ({"install": ["a==1; rm -rf /"]}, "not pinned"),
        ({"install": ["p @ git+https://x/y@main"]}, "not pinned"),
        ({"api_url": "http://api.example"}, "expected https"),
        ({"address": "http://127.0.0.1:1"}, "expected https"),
        ({"max_usd_per_hour": 0.1}, "not one pod"),
        ({"ladder": [{"gpu": "moon", "max_usd_per_hour": 1}]}, "price table"),
        ({"pool": "a-b"}, "pattern"),
    ],
    ids=str,
)
def test_settings_that_would_be_regretted(change: dict, word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        config(**change)


def test_pinned_requirements_are_installed_before_the_worker_starts() -> None:
    wanted = ["verifiers==0.4.0", "prime-rl @ git+https://github.com/x/prime-rl@" + "a" * 40]
    command = pod_command(config(install=wanted).install)
    assert command[:2] == ["bash", "-c"]
    assert command[2].endswith('exec "$python" -m nestling.fleet.pods.worker')
    assert wanted[1] in command[2]
    assert "pip" not in pod_command(())[2]


def test_the_recipe_is_the_published_arc() -> None:
    settings = [f"fleet.image={IMAGE}", "fleet.address=https://198.51.100.7:8443"]
    recipe = load_recipe(REPO / "recipes" / "runpod.toml", settings)
    assert [rung.gpu for rung in recipe.fleet.ladder] == ["a5000", "a40", "rtx4090", "a6000"]
    assert recipe.fleet.workers == 16
    assert recipe.outer.groups_per_step * recipe.outer.group_size == 40
    assert recipe.fleet.machine == "rtx4090"  # the dearest, so that reservations are upper bounds
    with pytest.raises(ConfigError, match=r"fleet\.image is missing"):
        load_recipe(REPO / "recipes" / "runpod.toml")


@pytest.mark.parametrize("listen", ["8443:", "host", "127.0.0.1:x", "127.0.0.1:70000", "taken"])
def test_an_address_that_cannot_be_listened_on_is_named(listen: str) -> None:
    with listening_socket("127.0.0.1:0") as one:
        where = f"127.0.0.1:{one.getsockname()[1]}" if listen == "taken" else listen
        with pytest.raises(ConfigError, match=r"fleet\.listen"):
            listening_socket(where)


@pytest.mark.parametrize("kind", ["ray", "runpod"])
def test_models_are_not_kept_on_other_machines(kind: str) -> None:
    recipe = REPO / "recipes" / "runpod.toml" if kind == "runpod" else None
    settings = [f"fleet.image={IMAGE}", "fleet.address=https://198.51.100.7:8443"]
    settings = settings if recipe else ["fleet.kind=ray"]
    check_names(load_recipe(recipe, settings))
    with pytest.raises(ConfigError, match=r"keep_models = true.*to local"):
        check_names(load_recipe(recipe, [*settings, "inner.keep_models=true"]))
