"""The simulated account behaves as the recorded one does, point by point."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from nestling.core.errors import ConfigError
from nestling.fleet.runpod_simulator.app import RunpodApp
from nestling.fleet.runpod_simulator.script import Script, load_script
from nestling.fleet.runpod_simulator.server import simulated_account

from .conftest import IMAGE

KEY = "the-key"
BODY = {
    "name": "one",
    "image": IMAGE,
    "gpu": {"id": "NVIDIA RTX A5000"},
    "env": {"A": "{{ RUNPOD_SECRET_s }}", "B": "plain"},
    "ports": ["22/tcp", "8000/http"],
}


class Client:
    """Talks to the account without a socket; its pods never boot unless time is moved."""

    def __init__(self, app: RunpodApp) -> None:
        self.app = app
        self.account = app.account
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app),
            base_url="http://sim",
            headers={"authorization": f"Bearer {KEY}", "user-agent": "test"},
        )

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return await self.http.request(method, f"/v2{path}", json=body, **options)

    async def made(self, **changes: Any) -> dict:
        reply = await self.ask("POST", "/pods", BODY | changes)
        assert reply.status_code == 201, reply.text
        return reply.json()

    async def seen(self, pod: dict) -> dict:
        return (await self.ask("GET", f"/pods/{pod['id']}")).json()


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def start(**script: Any) -> Client:
            settings = Script.model_validate({"boot_s": 600.0, "boot_spread": 0.0} | script)
            app = await stack.enter_async_context(simulated_account(settings, tmp_path, key=KEY))
            made = Client(app)
            await stack.enter_async_context(made.http)
            return made

        yield start


async def test_keys_and_agents(client) -> None:
    api = await client()
    for headers, status in (
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": f"Bearer {KEY}-read"}, 200),
    ):
        assert (await api.ask("GET", "/pods", headers=headers)).status_code == status
    reading = {"authorization": f"Bearer {KEY}-read"}
    assert (await api.ask("POST", "/pods", BODY, headers=reading)).status_code == 403
    for agent in ("", "Python-urllib/3.11"):
        reply = await api.ask("GET", "/pods", headers={"user-agent": agent})
        assert (reply.status_code, "1010" in reply.text) == (403, True)
        assert reply.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        ({"podName": "x"}, 422, "unexpected property podName"),
        ({"name": None}, 422, "name: wrong type"),
        ({"gpu": {"id": "NVIDIA A40", "colour": 1}}, 422, "gpu.colour"),
        ({"gpu": {}}, 422, "missing required property gpu.id"),
        ({"cpu": {"id": "x"}}, 400, "exactly one"),
        ({"gpu": {"id": "a", "minCudaVersion": "12", "allowedCudaVersions": []}}, 400, "exclude"),
        ({"mounts": {"network": [], "persistent": {}}}, 400, "exclude"),
        ({"templateId": "nope"}, 404, "Template"),
        ({"env": {f"V{n}": "" for n in range(51)}}, 422, "env"),
        ({"env": {"A": "x" * 110_000}}, 413, "large"),
        ({"gpu": {"id": "NVIDIA Unheard Of"}}, 400, "no longer any instances"),
        ({"dataCenterIds": ["EU-XX-9"]}, 400, "no longer any instances"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_bodies_that_are_refused(client, change: dict, status: int, word: str) -> None:
    api = await client()
    reply = await api.ask("POST", "/pods", BODY | change)
    assert reply.status_code == status
    assert word in reply.text
    assert (await api.ask("DELETE", "/pods")).headers["allow"] == "GET, POST"
    assert (await api.ask("DELETE", "/pods")).status_code == 405


async def test_missing_field_lists_valid_ones_as_unexpected_first(client) -> None:
    api = await client()
    reply = await api.ask("POST", "/pods", {"gpu": {"id": "NVIDIA A40"}, "image": IMAGE})
    assert reply.status_code == 422
    assert reply.json()["errors"][-1] == "missing required property name"
    assert "unexpected property image" in reply.json()["errors"]


async def test_stock_goes_down_and_comes_back_and_the_catalog_is_late(client) -> None:
    stock = [{"gpu": "NVIDIA RTX A5000", "count": 1, "usd_per_hour": 0.27}]
    api = await client(stock=stock, catalog_lag_s=60.0)
    query = "/catalog/gpus?include=AVAILABILITY&product=POD"

    async def level() -> str:
        return (await api.ask("GET", query)).json()["gpus"][0]["availability"]

    pod = await api.made()
    assert await level() == "LOW"
    assert (await api.ask("POST", "/pods", BODY)).status_code == 400
    api.account.time.advance(61)
    assert await level() == "NONE"
    assert (await api.ask("DELETE", f"/pods/{pod['id']}")).status_code == 204
    assert (await api.ask("POST", "/pods", BODY)).status_code == 201
    assert (await api.ask("GET", "/catalog/gpus?include=AVAILABILITY")).status_code == 400
    assert (await api.ask("GET", "/catalog/gpus/NVIDIA RTX A5000")).status_code == 200
    assert (await api.ask("GET", "/catalog/gpus/NVIDIA Moon")).status_code == 404
    assert (await api.ask("GET", "/catalog/datacenters")).json()["dataCenters"]


async def test_credit_drains_and_pods_end_with_it(client) -> None:
    api = await client(credit_usd=0.6)
    pod = await api.made()
    mounted = {"mounts": {"network": [{"volumeId": "v", "path": "/w"}]}}
    kept = await api.made(name="two", **mounted)
    assert (await api.ask("POST", "/pods", BODY)).status_code == 402
    api.account.time.advance(1800)
    assert api.app.report()["usd"] == pytest.approx(0.27, abs=0.01)
    api.account.time.advance(3600)
    assert (await api.ask("GET", f"/pods/{pod['id']}")).status_code in (200, 404)
    assert (await api.ask("GET", f"/pods/{pod['id']}")).status_code == 404
    assert (await api.seen(kept))["status"] == "EXITED"
    assert (await api.seen(kept))["cost"] > 0  # not zero after a stop


@pytest.mark.parametrize(
    ("fault", "at_start", "middle", "end"),
    [
        (None, "PROVISIONING", "STARTING", None),
        ("no_runtime", "RUNNING", "RUNNING", "RUNNING"),
        ("error", "PROVISIONING", "STARTING", "ERROR"),
    ],
)
async def test_states_of_a_boot(client, fault, at_start: str, middle: str, end: str | None) -> None:
    api = await client(pod=[{"pods": [1], "do": fault}] if fault else [])
    pod = await api.made()
    assert pod["status"] == at_start
    assert (pod["runtime"], pod["ssh"]["direct"]) == (None, None)
    api.account.time.advance(300)
    assert (await api.seen(pod))["status"] == middle
    if end is not None:
        api.account.time.advance(301)
        found = await api.seen(pod)
        assert (found["status"], found["runtime"]) == (end, None)


async def test_actions_follow_the_state(client) -> None:
    api = await client(pod=[{"pods": [2], "do": "lock"}])
    pod = await api.made()
    path = f"/pods/{pod['id']}/action"
    refused = await api.ask("POST", path, {"action": "restart"})
    assert (refused.status_code, refused.json()["errors"]) == (409, ["stop", "terminate"])
    assert (await api.ask("POST", path, {"action": "fly"})).status_code == 422
    assert (await api.ask("POST", path, {"action": "stop"})).json()["status"] == "EXITED"
    assert (await api.ask("POST", path, {"action": "terminate"})).status_code == 204
    assert (await api.ask("DELETE", f"/pods/{pod['id']}")).status_code == 404
    locked = await api.made(name="locked")
    assert (await api.ask("DELETE", f"/pods/{locked['id']}")).status_code == 409
    cluster = await api.made(name="cluster")
    api.account.pods[cluster["id"]].body["cluster"] = True
    assert (await api.ask("DELETE", f"/pods/{cluster['id']}")).status_code == 409


@pytest.mark.parametrize("how", ["closed", "500", "502"])
@pytest.mark.parametrize("do", ["reply_lost", "not_done"])
async def test_a_lost_reply_and_its_twin_look_alike(client, how: str, do: str) -> None:
    fault = {"route": "create", "nth": [1], "do": do, "how": how}
    api = await client(request=[fault])
    try:
        reply = await api.ask("POST", "/pods", BODY)
        assert reply.status_code == int(how)
    except AssertionError:
        assert how == "closed"  # cut short, as a broken connection
    pods = (await api.ask("GET", "/pods")).json()["pods"]
    assert len(pods) == (1 if do == "reply_lost" else 0)


async def test_lists_and_addresses_may_lag(client) -> None:
    lags = [
        {"pods": [1], "do": "list_lag", "seconds": 10},
        {"pods": [1], "do": "get_lag", "seconds": 20},
        {"pods": [1], "do": "delete_lag", "seconds": 10},
    ]
    api = await client(pod=lags)
    pod = await api.made()

    async def shown() -> tuple[int, int]:
        listed = (await api.ask("GET", "/pods")).json()["pods"]
        return len(listed), (await api.ask("GET", f"/pods/{pod['id']}")).status_code

    assert await shown() == (0, 404)
    api.account.time.advance(11)
    assert await shown() == (1, 404)
    api.account.time.advance(11)
    assert await shown() == (1, 200)
    assert (await api.ask("DELETE", f"/pods/{pod['id']}")).status_code == 204
    assert (await shown())[0] == 1
    api.account.time.advance(11)
    assert await shown() == (0, 404)


async def test_rate_limits_in_three_windows(client) -> None:
    api = await client(per_minute=3, per_hour=5)
    replies = [await api.ask("GET", "/pods") for _ in range(4)]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
    assert int(replies[-1].headers["retry-after"]) >= 1
    assert '"hour";r=3' in replies[1].headers["ratelimit"]
    assert '"minute";q=3;w=60' in replies[0].headers["ratelimit-policy"]
    api.account.time.advance(61)
    assert (await api.ask("GET", "/pods")).status_code == 200
    assert (await api.ask("GET", "/pods")).status_code == 429  # the hour is used up
    free = await client(exempt=True)
    assert "ratelimit" not in (await free.ask("GET", "/pods")).headers


async def test_pages_may_be_short(client) -> None:
    api = await client(page=2)
    for number in range(5):
        await api.made(name=f"pod{number}")
    names, cursor = [], None
    while True:
        query = "/pods?limit=4" + (f"&cursor={cursor}" if cursor else "")
        page = (await api.ask("GET", query)).json()
        assert len(page["pods"]) <= 2
        names += [pod["name"] for pod in page["pods"]]
        cursor = page["pagination"]["nextCursor"]
        if not page["pagination"]["hasNextPage"]:
            break
    assert names == [f"pod{number}" for number in (4, 3, 2, 1, 0)]
    assert (await api.ask("GET", "/pods?limit=0")).status_code == 422
    assert (await api.ask("GET", "/pods?colour=red")).status_code == 200  # silently ignored


async def test_environment_is_shown_in_clear_but_secrets_are_not(client) -> None:
    api = await client()
    secret = {"name": "s", "value": "canary"}
    assert (await api.ask("POST", "/account/secrets", secret)).status_code == 201
    assert (await api.ask("POST", "/account/secrets", secret)).status_code == 409
    pod = await api.made()
    assert pod["env"] == BODY["env"]
    assert api.account.pods[pod["id"]].environment["A"] == "canary"
    found = (await api.ask("GET", "/account/secrets")).json()["secrets"]
    assert [one["name"] for one in found] == ["s"]
    assert "canary" not in json.dumps(found)
    assert "canary" not in api.app.seen.text()
    assert (await api.ask("DELETE", f"/account/secrets/{found[0]['id']}")).status_code == 204


async def test_bills_by_pod_and_hour_and_ids_on_all_answers(client) -> None:
    api = await client()
    pod = await api.made()
    for _ in range(3):
        api.account.time.advance(1800)
        api.account.settle()
    bill = (await api.ask("GET", f"/billing/pods?podId={pod['id']}")).json()["records"]
    assert sum(record["totalAmount"] for record in bill) == pytest.approx(0.405, abs=0.001)
    assert len(bill) >= 2
    assert len((await api.ask("GET", "/pods")).headers["x-request-id"]) == 32
    assert (await api.ask("PUT", "/account/ssh-keys", {"keys": ["k"]})).json() == {"keys": ["k"]}
    made = (await api.ask("POST", "/templates", {"name": "t"})).json()
    assert (await api.ask("GET", f"/templates/{made['id']}")).json()["name"] == "t"


async def test_bursts_stalls_and_answers_that_are_no_json(client) -> None:
    faults = [
        {"route": "list", "nth": [1], "do": "status", "status": 503},
        {"route": "list", "nth": [2], "do": "html", "status": 502},
        {"route": "list", "nth": [3], "do": "stall", "seconds": 0.05},
        {"route": "create", "nth": [1], "do": "stock_out"},
    ]
    api = await client(request=faults)
    assert (await api.ask("GET", "/pods")).status_code == 503
    reply = await api.ask("GET", "/pods")
    assert (reply.status_code, reply.text[:6]) == (502, "<html>")
    assert (await api.ask("GET", "/pods")).status_code == 200
    assert (await api.ask("POST", "/pods", BODY)).status_code == 400


async def test_a_pod_may_end_only_itself(client) -> None:
    api = await client()
    own, other = await api.made(), await api.made(name="two")
    key = {"authorization": f"Bearer {api.account.pods[own['id']].key}"}
    for pod, action, status in ((other, "terminate", 403), (own, "stop", 403)):
        path = f"/pods/{pod['id']}/action"
        assert (await api.ask("POST", path, {"action": action}, headers=key)).status_code == status
    assert (await api.ask("GET", "/pods", headers=key)).status_code == 403
    path = f"/pods/{own['id']}/action"
    assert (await api.ask("POST", path, {"action": "terminate"}, headers=key)).status_code == 204


def test_a_wrong_script_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "faults.toml"
    path.write_text('[[pod]]\npods = [1]\ndo = "explode"\n')
    with pytest.raises(ConfigError, match=r"(?s)faults\.toml.*explode"):
        load_script(path)
    path.write_text("boot_s = 5\n")
    assert load_script(path).boot_s == 5.0
    (tmp_path / "faults.json").write_text('{"boot_s": 6}')
    assert load_script(tmp_path / "faults.json").boot_s == 6.0
