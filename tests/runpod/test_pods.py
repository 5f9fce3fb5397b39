"""Real pods over real sockets, in real time: what travels, what is wiped, what is refused."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import httpx
import msgspec
import pytest

from nestling.core.errors import FleetError
from nestling.fleet.pods.boot import BOOT_KEY_VARIABLE, BOOT_VARIABLE, Boot
from nestling.fleet.pods.client import NotEnrolledError, PodClient
from nestling.fleet.pods.identity import PodIdentity
from nestling.fleet.pods.wire import PIECE_BYTES, Refusal

from .conftest import API_KEY, EVAL_SECRET, free_port, open_pods, simulated, until


@pytest.mark.long
async def test_jobs_and_what_travels_with_them(pods, tmp_path: Path) -> None:
    """One warm pod: bundles in pieces, large results, wipes, secrets, a clean environment."""
    async with pods(fleet={"workers": 1}) as room:
        bundle = room.artifacts.put(os.urandom(3 * PIECE_BYTES + 17))
        first = (await room.do("fetch", {"bundle": bundle})).result
        again = (await room.do("fetch", {"bundle": bundle})).result
        assert first == {"size": 3 * PIECE_BYTES + 17, "found": []}
        assert again == first  # what the first job left is gone
        large = await room.do("big", {"size": 2_000_000})
        assert hashlib.sha256(large.result.encode()).hexdigest() == _digest("b" * 2_000_000)
        assert bytes.fromhex((await room.do("secret")).result) == EVAL_SECRET
        environment = (await room.do("environment")).result
        values = "\n".join(environment.values())
        pod = next(iter(room.account.pods.values()))
        boot_text = pod.environment[BOOT_KEY_VARIABLE]
        for needle in (API_KEY, pod.key, boot_text):
            assert needle not in values
        assert environment["OMP_NUM_THREADS"] == "1"
        failed = await room.do("reject")
        assert (failed.state, failed.reason) == ("failed", "train.diverged")
        # The worker process dies: the job is tried again on the same pod, which stays.
        died = await room.do("die", max_tries=2)
        assert (died.state, died.reason, died.tries) == ("failed", "lost", 2)
        assert (await room.do("echo", {"n": 7})).result["echo"] == 7
        assert len(room.account.pods) == 1
        shown = pod.show(room.account.time.now())["env"]
        assert shown[BOOT_KEY_VARIABLE].startswith("{{ RUNPOD_SECRET_")
        assert boot_text not in room.simulator.app.seen.text()
        await _strangers_are_kept_out(room, shown, boot_text)
    assert room.account.live_pods() == []
    assert room.account.secrets == {}
    spent = room.provider.keeper._records.spent_usd()
    assert spent == pytest.approx(room.account.spent_usd(), rel=0.5, abs=1e-4)


async def _strangers_are_kept_out(room, shown: dict, boot_text: str) -> None:
    boot = msgspec.json.decode(shown[BOOT_VARIABLE], type=Boot)
    good = PodIdentity.boot_key_of(boot_text)
    async with PodClient(boot.address, boot.certificate) as client:
        with pytest.raises(NotEnrolledError):
            await client.inbox(0)
        with pytest.raises(NotEnrolledError):
            await client.enrol(boot.name, "life", os.urandom(32), {})
        refused = await client.enrol("nestling-0-nobody", "life", good, {})
        assert isinstance(refused, Refusal)
        assert refused.reason == "not wanted"
    other = PodIdentity.load_or_create(Path(room.artifacts.folder).parent / "other")
    async with PodClient(boot.address, other.certificate) as client:
        with pytest.raises(FleetError, match="CERTIFICATE_VERIFY_FAILED"):
            await client.inbox(0)
    async with httpx.AsyncClient(verify=False) as plain:
        for path in ("/v1/inbox?after=0&wait=1", "/v1/artifacts/" + "0" * 64):
            assert (await plain.get(boot.address + path)).status_code == 401


@pytest.mark.long
async def test_drifted_software_is_refused_and_ends_the_run(pods) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with pods(fleet={"workers": 1, "pins": {"verifiers": "9.9.9"}}) as room:
            await room.do("echo", {"n": 1})
    group = caught.value.exceptions[0]
    assert isinstance(group, ExceptionGroup)
    assert "verifiers is 0.4.0; expected 9.9.9" in str(group.exceptions[0])


@pytest.mark.long
async def test_the_next_controller_takes_the_warm_pods_over(pods, tmp_path: Path) -> None:
    """`fleet up`, then a run: the pods wait, enrol again and work, without another boot."""
    async with simulated(tmp_path) as simulator:
        here = f"127.0.0.1:{free_port()}"
        settings = {
            "simulator": simulator,
            "workers": 2,
            "listen": here,
            "address": f"https://{here}",
        }
        async with open_pods(tmp_path, None, closes=False, **settings) as room:
            await room.provider.wait_for_pods(2)
            await room.provider.detach()
        assert len(simulator.app.account.live_pods()) == 2
        async with open_pods(tmp_path, None, **settings) as room:
            results = [await room.do("echo", {"n": n}) for n in range(4)]
            assert [one.state for one in results] == ["done"] * 4
            assert len(simulator.app.account.pods) == 2
        await until(lambda: simulator.app.account.live_pods() == [])


@pytest.mark.long
async def test_pods_without_a_controller_end_themselves(tmp_path: Path) -> None:
    async with simulated(tmp_path) as simulator:
        settings = {"simulator": simulator, "workers": 1, "lost_controller_s": 1.0}
        async with open_pods(tmp_path, None, closes=False, **settings) as room:
            await room.provider.wait_for_pods(1)
            await room.provider.detach()
        await until(lambda: simulator.app.account.live_pods() == [])
        asked = [path for method, path, _ in simulator.app.seen.requests if method == "POST"]
        assert asked[-1].endswith("/action")


@pytest.mark.slow
async def test_workers_that_cannot_start_end_the_run_with_their_words(pods) -> None:
    """On the same pod three times, as a boot costs more than a start; then the pool gives up."""
    with pytest.raises(ExceptionGroup) as caught:
        async with pods(fleet={"workers": 1, "handlers": "pod_handlers:break_down"}) as room:
            await room.do("echo", {"n": 1})
    group = caught.value.exceptions[0]
    assert isinstance(group, ExceptionGroup)
    assert "the accelerator is on fire" in str(group.exceptions[0])
    assert len(room.account.pods) in (2, 3)  # one may be on its way when the pool gives up
    assert room.account.live_pods() == []


@pytest.mark.long
async def test_strays_and_half_made_pods_of_a_dead_controller_are_ended(pods) -> None:
    async with pods(fleet={"workers": 1}) as room:
        prefix = room.provider.keeper._prefix
        body = {"image": "x", "gpu": {"id": "NVIDIA A40", "count": 1}, "env": {}}
        stray = room.account.create(body | {"name": f"{prefix}stray"})
        other = room.account.create(body | {"name": "somebody-else"})
        await until(lambda: stray.deleted_at is not None)
        assert other.deleted_at is None


@pytest.mark.slow
async def test_a_pod_that_never_boots_is_replaced_and_its_log_is_kept(pods) -> None:
    boots = {"fleet": {"workers": 1, "boot_s": 1.0, "idle_s": 60.0}}
    async with pods(
        pod=[{"pods": [1], "do": "error"}, {"pods": [2], "do": "no_runtime"}], **boots
    ) as room:
        assert (await room.do("echo", {"n": 1})).state == "done"
        whys = [event.data["why"] for event in room.events("pod.ending")]
        assert any("status is ERROR" in why for why in whys)
        [why] = [why for why in whys if "no word of its worker within 1 s" in why]
        assert "create container of registry.example" in why


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
