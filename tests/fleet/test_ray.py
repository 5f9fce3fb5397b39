"""Workers on real Ray clusters of several nodes, which are really killed."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError, FleetError
from nestling.core.rundir import ArtifactStore
from nestling.fleet import process_tree
from nestling.fleet.pool import Pool, PoolLimits
from nestling.fleet.providers.ray_cluster import RayProvider, RaySlots
from nestling.fleet.queue import JobQueue
from nestling.fleet.watch import JobWatch
from nestling.store import GroupCommit, RunStore
from nestling.store.jobs import NewJob

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed; pip install 'nestling[ray]'",
    ),
]

HERE = Path(__file__).parent


class Cluster:
    """Nodes of one CPU and a small object store each, as `ray start` makes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.id = secrets.token_hex(4)
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
            "RAY_gcs_server_request_timeout_seconds": "10",
            "NESTLING_RAY_FOLDER": str(folder / "nodes"),
        }
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._count = 0

    def start_head(self, *, num_cpus: int = 1) -> None:
        options = ["--head", f"--port={self.port}", f"--temp-dir={self.folder}"]
        self._start("head", num_cpus, [*options, "--include-dashboard=false"])

    def start_node(self) -> str:
        self._count += 1
        name = f"node{self._count}"
        self._start(name, 1, [f"--address={self.address}"])
        return name

    def kill_raylet(self, name: str) -> None:
        """The node is lost at once; what ran there must notice by itself."""
        for pid in process_tree.tree(None, self._marker(name)):
            if _is_raylet(pid):
                os.kill(pid, signal.SIGKILL)

    def raylets(self) -> list[int]:
        """Those of all nodes; a node that has lost its head ends by itself."""
        names = ["head", *(f"node{number}" for number in range(1, self._count + 1))]
        trees = (process_tree.tree(None, self._marker(name)) for name in names)
        return [pid for found in trees for pid in found if _is_raylet(pid)]

    def busy_node(self, run: Path) -> str | None:
        """A node, not the head, on which a job is being trained."""
        rows = _rows(run, "SELECT worker FROM jobs WHERE kind = 'run' AND state = 'running'")
        for marker in set(_workers()):
            name, _, owner = marker.partition("/")[2].partition("#")
            with suppress(psutil.Error):
                slot = process_tree.marker_of(psutil.Process(int(owner.split("-")[1])))
                if (name,) in rows and slot.startswith(self._marker("node")):
                    return slot.removeprefix(self._marker(""))
        return None

    def kill(self, name: str) -> None:
        """Power off."""
        assert process_tree.end_tree(None, self._marker(name)) == []

    def stop(self) -> None:
        for number in range(1, self._count + 1):
            self.kill(f"node{number}")
        self.kill("head")

    def _marker(self, name: str) -> str:
        return f"cluster-{self.id}/{name}"

    def _start(self, name: str, num_cpus: int, options: list[str]) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
        command += [*options, f"--num-cpus={num_cpus}", "--object-store-memory=80000000"]
        command += ["--node-ip-address=127.0.0.1", "--min-worker-port=0", "--max-worker-port=0"]
        marker = {process_tree.MARKER: self._marker(name)}
        with (self.folder / f"{name}.log").open("ab") as log:
            done = subprocess.run(
                command,
                env=os.environ | self.environment | marker,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=120,
                check=False,
            )
        assert done.returncode == 0, (self.folder / f"{name}.log").read_text()[-3000:]


@contextmanager
def open_cluster(num_nodes: int) -> Iterator[Cluster]:
    """The head is one of the nodes."""
    folder = Path(tempfile.mkdtemp(prefix="nrt", dir="/tmp"))  # Ray's sockets need a short path
    (folder / "nodes").mkdir()
    cluster = Cluster(folder)
    try:
        cluster.start_head()
        for _ in range(num_nodes - 1):
            cluster.start_node()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


class Room:
    """Queue, pool and provider of one test."""

    def __init__(self, store: RunStore, queue: JobQueue, provider: RayProvider) -> None:
        self.store, self.queue, self.provider = store, queue, provider
        self.watch = JobWatch(store)

    def enqueue(self, job_id: str, kind: str, payload: dict, **fields) -> None:
        fields = {"max_tries": 20} | fields
        self.queue.enqueue(NewJob(id=job_id, kind=kind, payload=payload, **fields))

    async def result(self, job_id: str):
        over = self.watch.expect(job_id)
        if self.store.jobs.get(job_id).state in ("queued", "running"):
            await over
        return self.store.jobs.get(job_id)

    def num_done(self) -> int:
        return self.store.jobs.counts()["done"]


@asynccontextmanager
async def open_room(folder: Path, cluster: Cluster | None, monkeypatch, **options):
    for key, value in (cluster.environment if cluster else {}).items():
        monkeypatch.setenv(key, value)
    size = options.pop("workers", 3)
    lease_s = options.pop("lease_s", 10.0)
    slots = RaySlots(
        handlers="fleet_handlers:make_handlers",
        artifacts=ArtifactStore(folder / "artifacts"),
        logs=folder / "logs",
        workers=size,
        address=cluster.address if cluster else "",
        beat_s=0.2,
        environment={"PYTHONPATH": str(HERE)},
        **options,
    )
    clock = SystemClock()
    with RunStore(folder / "run.db") as store, GroupCommit(store) as writer:
        queue = JobQueue(store, clock=clock, session="s1", lease_s=lease_s)
        provider = RayProvider(slots, writer)
        limits = PoolLimits(backoff_s=0.1, max_backoff_s=2.0, expire_every_s=0.2)
        pool = Pool(
            queue=queue, writer=writer, provider=provider, size=size, clock=clock, limits=limits
        )
        try:
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(pool.run())
                try:
                    yield Room(store, queue, provider)
                    pool.stop()
                    await serving
                finally:
                    serving.cancel()
        finally:
            await provider.close()
    if cluster is not None:
        await _until(lambda: not _workers(), 30)
        assert list((cluster.folder / "nodes").glob("*/*")) == []


async def test_node_killed_under_load(tmp_path: Path, monkeypatch) -> None:
    num_jobs = 80
    with open_cluster(3) as cluster:
        async with open_room(tmp_path, cluster, monkeypatch) as room:
            for number in range(num_jobs):
                room.enqueue(f"j{number}", "nap", {"n": number}, group_key=f"g{number % 4}")
            await _until(lambda: room.num_done() > 10)
            assert len(await room.provider.list()) == 3
            cluster.kill_raylet("node1")
            await _until(lambda: room.num_done() > 40)
            cluster.kill("node2")
            await asyncio.to_thread(cluster.start_node)
            await _all_once(room, num_jobs)


async def test_pool_with_more_workers_than_room_serves_and_stops(tmp_path, monkeypatch) -> None:
    with open_cluster(1) as cluster:
        async with open_room(tmp_path, cluster, monkeypatch) as room:
            for number in range(8):
                room.enqueue(f"j{number}", "nap", {"n": number})
            await _all_once(room, 8)
            assert len(await room.provider.list()) == 1
            started = time.monotonic()
        assert time.monotonic() - started < 25


async def test_too_little_room_is_said(tmp_path: Path, monkeypatch) -> None:
    with open_cluster(1) as cluster:
        needs = {"workers": 1, "num_gpus": 1.0, "patience_s": 1.0}
        with pytest.raises(ExceptionGroup) as raised:
            await _one_job(tmp_path, cluster, monkeypatch, **needs)
        (error,) = raised.value.exceptions
        assert isinstance(error, FleetError)
        assert "a worker needs CPU 1, GPU 1; the cluster had CPU 1" in str(error)


async def test_killed_actor_leaves_nothing(tmp_path: Path, monkeypatch, until) -> None:
    started = tmp_path / "started"
    with open_cluster(2) as cluster:
        async with open_room(tmp_path, cluster, monkeypatch, workers=1) as room:
            room.enqueue("j0", "leave_children", {"started": str(started), "seconds": 300})
            await until(lambda: started.exists() and len(started.read_text().split()) == 3)
            worker, near, away = map(int, started.read_text().split())
            os.kill(psutil.Process(worker).ppid(), signal.SIGKILL)
            await until(lambda: process_tree.start_ticks(worker) is None)
            started.unlink()
            await until(lambda: started.exists() and len(started.read_text().split()) == 3)
            # The new slot, wherever it is on this machine, found what the dead one left.
            assert process_tree.start_ticks(near) is None
            assert process_tree.start_ticks(away) is None
            assert room.store.jobs.get("j0").tries == 2
            room.queue.cancel("j0")
            again = int(started.read_text().split()[0])
            os.kill(again, signal.SIGKILL)


async def test_head_killed_and_started_again(tmp_path: Path, monkeypatch) -> None:
    num_jobs = 60
    with open_cluster(3) as cluster:
        async with open_room(tmp_path, cluster, monkeypatch) as room:
            for number in range(num_jobs):
                room.enqueue(f"j{number}", "nap", {"n": number})
            await _until(lambda: room.num_done() > 10)
            cluster.kill("head")
            # Ray refuses to start a head at an address that a node of this machine still looks for.
            await _until(lambda: cluster.raylets() == [])
            await asyncio.to_thread(cluster.start_head)
            await asyncio.to_thread(cluster.start_node)
            await _all_once(room, num_jobs)


async def test_secret_is_nowhere_to_be_read(tmp_path: Path, monkeypatch, until) -> None:
    key = secrets.token_bytes(32)
    forms = [key, key.hex().encode(), base64.b64encode(key), repr(key)[2:-1].encode()]
    started = tmp_path / "started"
    with open_cluster(2) as cluster:
        async with open_room(
            tmp_path, cluster, monkeypatch, workers=2, private={"eval-secret": key}
        ) as room:
            room.enqueue("j0", "sleep", {"started": str(started), "seconds": 2.0})
            await until(lambda: started.exists())
            file = next((cluster.folder / "nodes").glob("*/*/state/eval-secret"))
            assert file.read_bytes() == key
            assert file.stat().st_mode & 0o777 == 0o600
            assert file.parents[2].stat().st_mode & 0o077 == 0
            seen = b"".join(_told_by_proc())
            assert not [form for form in forms if form in seen]
            room.enqueue("j1", "die", {}, max_tries=2)
            assert (await room.result("j1")).state == "failed"
            assert (await room.result("j0")).state == "done"
        places = [tmp_path, cluster.folder]
        files = [path for place in places for path in place.rglob("*") if path.is_file()]
        assert any("session_" in str(path) for path in files)
        assert not [p for p in files for form in forms if form in p.read_bytes()]


async def test_full_object_store_stops_nothing(tmp_path: Path, monkeypatch) -> None:
    """Messages larger than what Ray keeps in calls, while another driver fills the store."""
    text = "x" * 2_000_000
    fill = (
        "import os, sys, ray; ray.init(address=sys.argv[1], log_to_driver=False); "
        "kept = [ray.put(os.urandom(9_000_000)) for _ in range(8)]; print('full', flush=True); "
        "sys.stdin.read()"
    )
    with open_cluster(1) as cluster, ExitStack() as stack:
        filler = stack.enter_context(
            subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-c", fill, cluster.address],
                env=os.environ | cluster.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        stack.callback(filler.kill)
        assert filler.stdout.readline() == b"full\n"
        async with open_room(tmp_path, cluster, monkeypatch, workers=1) as room:
            bundle = ArtifactStore(tmp_path / "artifacts").put(os.urandom(300_000))
            for number in range(3):
                room.enqueue(f"j{number}", "echo", {"text": text, "n": number, "bundle": bundle})
            for number in range(3):
                record = await room.result(f"j{number}")
                assert (record.state, record.tries) == ("done", 1)
                assert record.result["echo"]["text"] == text
            (kept,) = (cluster.folder / "nodes").glob(f"*/*/run/artifacts/*/{bundle}")
            assert kept.stat().st_size == 300_000


async def test_local_cluster_starts_and_ends(tmp_path: Path, monkeypatch) -> None:
    async with open_room(tmp_path, None, monkeypatch, workers=2) as room:
        for number in range(6):
            room.enqueue(f"j{number}", "nap", {"n": number})
        await _all_once(room, 6)
    names = [process.name() for process in psutil.Process().children(recursive=True)]
    assert not [name for name in names if "ray" in name or "gcs" in name]


async def test_no_cluster_there_is_said(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "2")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with RunStore(tmp_path / "run.db") as store, GroupCommit(store) as writer:
        slots = RaySlots(
            handlers="fleet_handlers:make_handlers",
            artifacts=ArtifactStore(tmp_path / "artifacts"),
            logs=tmp_path / "logs",
            workers=1,
            address="127.0.0.1:9",
        )
        provider = RayProvider(slots, writer)
        with pytest.raises(FleetError, match=r"cannot join the Ray cluster at 127\.0\.0\.1:9"):
            await provider.launch("cpu-0")
        await provider.close()
        with pytest.raises(ConfigError, match="Ray Client"):
            RayProvider(RaySlots(**{**_fields(slots), "address": "ray://head:10001"}), writer)


def test_nested_loop_gives_the_same_episodes_as_the_local_fleet(tmp_path: Path) -> None:
    """One step of recipes/quick.toml, on three nodes of which one is killed on the way."""
    local = _nested(tmp_path / "local", tmp_path / "state", {}, ["fleet.kind=local"])
    assert local.wait(timeout=500) == 0
    with open_cluster(3) as cluster:
        settings = ["fleet.kind=ray", f"fleet.address={cluster.address}", "fleet.workers=3"]
        run = tmp_path / "ray"
        ray = _nested(run, tmp_path / "state", cluster.environment, settings)
        try:
            while (busy := cluster.busy_node(run)) is None and ray.poll() is None:
                time.sleep(0.02)
            assert busy is not None
            cluster.kill_raylet(busy)
            assert ray.wait(timeout=500) == 0
        finally:
            ray.kill()
            ray.wait()
        assert _num_events(run, "job.requeued") >= 1
        assert _workers() == []
        assert list((cluster.folder / "nodes").glob("*/*")) == []
    ours, theirs = _episodes(run), _episodes(tmp_path / "local")
    print("killed", busy, "requeued", _num_events(run, "job.requeued"))
    for name, (state, outcome, reward, *_, job) in ours.items():
        print(name, state, outcome, reward, job and (job["post"], job["final_hash"]))
    assert len(theirs) == 4
    assert {name: one[0] for name, one in ours.items()} == dict.fromkeys(theirs, "finished")
    assert ours == theirs
    ended = _ended(run)
    assert set(ended.values()) == {1}
    assert ended.keys() == _ended(tmp_path / "local").keys()


_COMPARED = ("reward", "terms", "manifest", "valid_attempt", "num_turns", "sampled_tokens")
_MEASURED = ("cpu_s", "wall_s", "usd")
"""Of a job: what a clock said."""


def _nested(
    out: Path, state: Path, environment: dict[str, str], settings: list[str]
) -> subprocess.Popen[bytes]:
    settings = ["outer.steps=1", "outer.group_size=4", "outer.held_out.every_steps=0", *settings]
    settings += ["inner.eval_items=16", "references.arms=[]"]
    recipe = HERE.parents[1] / "recipes" / "quick.toml"
    command = [
        sys.executable,
        "-c",
        "from nestling.cli.main import main; main()",
        "run",
        str(recipe),
    ]
    command += ["--out", str(out)]
    command += [part for setting in settings for part in ("--set", setting)]
    state.mkdir(exist_ok=True)
    return subprocess.Popen(
        command,
        env=os.environ | environment | {"NESTLING_STATE": str(state), "OMP_NUM_THREADS": "1"},
    )


def _rows(run: Path, query: str) -> list[tuple]:
    if not (run / "run.db").exists():
        return []
    connection = sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True, timeout=30)
    try:
        return connection.execute(query).fetchall()
    except sqlite3.OperationalError:  # not made yet
        return []
    finally:
        connection.close()


def _num_events(run: Path, kind: str) -> int:
    rows = _rows(run, f"SELECT count(*) FROM events WHERE kind = '{kind}'")
    return rows[0][0] if rows else 0


def _episodes(run: Path) -> dict[str, tuple]:
    """What each finished episode did and earned."""
    found = {}
    for name, state, outcome, summary in _rows(
        run, "SELECT id, state, outcome, summary FROM episodes ORDER BY id"
    ):
        result = json.loads(summary)["result"]
        job = _unmeasured(result["outcome"])
        found[name] = (state, outcome, *(result[key] for key in _COMPARED), job)
    return found


def _unmeasured(value: object) -> object:
    if isinstance(value, dict):
        return {key: _unmeasured(one) for key, one in value.items() if key not in _MEASURED}
    return [_unmeasured(one) for one in value] if isinstance(value, list) else value


def _ended(run: Path) -> Counter[str]:
    return Counter(s for (s,) in _rows(run, "SELECT subject FROM events WHERE kind = 'job.done'"))


async def _one_job(folder: Path, cluster: Cluster, monkeypatch, **options) -> None:
    async with open_room(folder, cluster, monkeypatch, **options) as room:
        room.enqueue("j0", "nap", {"n": 1})
        await room.result("j0")


async def _all_once(room: Room, num_jobs: int) -> None:
    async with asyncio.timeout(240):
        records = [await room.result(f"j{number}") for number in range(num_jobs)]
    assert [record.result for record in records] == [n * n for n in range(num_jobs)]
    events = room.store.events.since(0, limit=100_000)
    done = Counter(event.subject for event in events if event.kind == "job.done")
    assert done == {f"j{number}": 1 for number in range(num_jobs)}
    print(Counter(event.kind for event in events))


async def _until(condition, limit_s: float = 120) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 (another process is what changes)
            await asyncio.sleep(0.05)


def _workers() -> list[str]:
    """Markers of live processes that a slot started."""
    markers = (process_tree.marker_of(process) for process in psutil.process_iter())
    return [marker for marker in markers if "#" in marker]


def _told_by_proc() -> Iterator[bytes]:
    for process in psutil.pids():
        for name in ("cmdline", "environ"):
            with suppress(OSError):
                yield Path(f"/proc/{process}/{name}").read_bytes()


def _is_raylet(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).name() == "raylet"
    return False


def _fields(slots: RaySlots) -> dict:
    return {name: getattr(slots, name) for name in RaySlots.__dataclass_fields__}
