"""A slot without Ray around it, and the settings of a Ray fleet."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from nestling.config import LocalFleet, RayFleet, RunConfig, load_recipe, recipe_toml
from nestling.core.errors import ConfigError, FleetError
from nestling.fleet import process_tree
from nestling.fleet.messages import (
    HEADER_BYTES,
    Done,
    Ready,
    Work,
    decode_from_worker,
    encode,
    frame_length,
)
from nestling.fleet.providers.ray_cluster import _Gateway
from nestling.fleet.providers.ray_gateway import Keep
from nestling.fleet.providers.ray_slot import NodeFolder, Slot, SlotSpec, node_root

HERE = Path(__file__).parent


@pytest.fixture
def spec(tmp_path: Path, monkeypatch) -> SlotSpec:
    monkeypatch.setenv("NESTLING_RAY_FOLDER", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "not for workers")
    return SlotSpec(
        run_id="r1",
        handlers="fleet_handlers:make_handlers",
        settings={},
        beat_s=5.0,
        environment={"PYTHONPATH": str(HERE)},
    )


@pytest.mark.long
async def test_gateway_that_stands_still_is_ended_with_whoever_writes_to_it(tmp_path: Path) -> None:
    gateway = _Gateway(tmp_path, f"test/{os.getpid()}/ray-gateway")
    os.kill(gateway._process.pid, signal.SIGSTOP)
    large = Keep(life=1, digest="d", data=b"x" * 2**22)  # more than a pipe holds
    saying = asyncio.ensure_future(gateway.say(large))
    while not gateway._writing.locked():  # noqa: ASYNC110 (another thread takes it)
        await asyncio.sleep(0.01)
    try:
        async with asyncio.timeout(20):
            await asyncio.to_thread(gateway.close)
    finally:
        gateway._process.kill()
    assert gateway._process.returncode == -signal.SIGKILL
    with pytest.raises(FleetError, match="connection to Ray is lost"):
        await saying


@pytest.fixture
def slot() -> Iterator[Slot]:
    slot = Slot()
    yield slot
    slot.stop()


def _next(slot: Slot, data: bytearray):
    while len(data) < HEADER_BYTES or len(data) < HEADER_BYTES + frame_length(bytes(data[:4])):
        piece = slot.receive()
        assert piece
        data += piece
    end = HEADER_BYTES + frame_length(bytes(data[:4]))
    body = bytes(data[HEADER_BYTES:end])
    del data[:end]
    return decode_from_worker(body)


def test_slot_serves_keeps_secrets_private_and_leaves_nothing(slot, spec, tmp_path: Path) -> None:
    pid = slot.start("cpu-0", spec, {"eval-secret": b"k" * 32}, "node-one")
    data = bytearray()
    assert _next(slot, data) == Ready(pid=pid)
    slot.send(encode(Work(token="t", job_id="j", kind="environment", payload={})))
    answer = _next(slot, data)
    assert isinstance(answer, Done)
    assert answer.result["OMP_NUM_THREADS"] == "1"
    assert not [key for key in answer.result if key.startswith("RAY_")]
    folder = node_root() / "r1-node-one"
    secret = folder / "state" / "eval-secret"
    assert secret.read_bytes() == b"k" * 32
    assert secret.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o077 == 0
    bundle = os.urandom(1000)
    name = hashlib.sha256(bundle).hexdigest()
    slot.keep(name, bundle[:600], False)
    slot.keep(name, bundle[600:], True)
    assert (folder / "run" / "artifacts" / name[:2] / name).read_bytes() == bundle
    with pytest.raises(FleetError, match="arrived damaged"):
        slot.keep(name, b"other", True)
    slot.stop()
    assert process_tree.start_ticks(pid) is None
    assert not folder.exists()
    with pytest.raises(FleetError, match="gone"):
        slot.send(b"x")


def test_other_version_is_refused(slot, spec) -> None:
    other = SlotSpec(
        run_id="r", handlers="a:b", settings={}, beat_s=1.0, environment={}, version="0.0.0"
    )
    with pytest.raises(FleetError, match=r"install nestling==0\.0\.0 on the nodes"):
        slot.start("cpu-0", other, {}, "n")


def test_worker_that_cannot_start_leaves_its_last_words(slot, spec) -> None:
    broken = SlotSpec(
        run_id="r1",
        handlers=spec.handlers,
        settings={"broken_start": True},
        beat_s=1.0,
        environment=spec.environment,
    )
    slot.start("cpu-0", broken, {}, "n")
    assert slot.receive() == b""
    assert "the accelerator is on fire" in slot.last_words()


def test_last_slot_removes_the_folder_and_leftovers_are_swept(tmp_path: Path) -> None:
    first, second = NodeFolder(tmp_path, "r-n"), NodeFolder(tmp_path, "r-n")
    (tmp_path / "dead-run").mkdir()
    NodeFolder.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["r-n"]
    first.leave()
    assert second.path.exists()
    second.leave()
    assert list(tmp_path.iterdir()) == []


def test_folder_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("NESTLING_RAY_FOLDER", str(tmp_path))
    root = node_root()
    root.chmod(0o755)
    with pytest.raises(FleetError, match="expected mode 0700"):
        node_root()


def test_fleet_is_chosen_by_kind() -> None:
    assert load_recipe(None, ["fleet.workers=3"]).fleet == LocalFleet(workers=3)
    settings = ["fleet.kind=ray", "fleet.address=head:6379", "fleet.resources={a40=1}"]
    config = load_recipe(None, settings)
    assert config.fleet == RayFleet(address="head:6379", resources={"a40": 1.0})
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    assert 'kind = "ray"' in recipe_toml(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["fleet.kind=ray", "fleet.adress=x"], "unknown key fleet.adress; did you mean address?"),
        (["fleet.worker=1"], "unknown key fleet.worker; did you mean workers?"),
        (["fleet.kind=slurm"], "fleet.kind should be local, ray or runpod"),
        (["fleet.kind=ray", "fleet.workers=0"], "fleet.workers = 0"),
    ],
)
def test_mistakes_in_the_fleet_table_are_named(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_recipe(None, settings)
    assert message in str(raised.value)
