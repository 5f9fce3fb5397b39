"""Workers on a Ray cluster: our queue stays the truth, Ray finds machines and notices their death.

One Ray actor per worker slot. Ray decides where it lives and holds its share of a node's resources;
it never restarts one or repeats a call, because the pool does both under a lease. A lost node, a
killed actor and a lost head therefore all look alike here: `FleetError` from the node, the job is
queued again, and `launch` waits until the cluster has room once more.

The Ray client lives in a process of its own (`ray_gateway`, which says why); this module speaks to
it through pipes and does not import Ray.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import msgspec

from nestling.core.errors import ConfigError, FleetError
from nestling.core.rundir import ArtifactStore
from nestling.fleet import process_tree
from nestling.fleet.finish import finish
from nestling.fleet.messages import (
    HEADER_BYTES,
    FromWorker,
    ToWorker,
    Work,
    artifacts_of,
    decode_from_worker,
    encode,
    frame_length,
)
from nestling.fleet.providers.ray_gateway import (
    Connect,
    Connected,
    Data,
    End,
    Ended,
    FromGateway,
    Gone,
    Keep,
    Launch,
    Refused,
    ToGateway,
    Up,
    Write,
    pack,
    read_frames,
)
from nestling.fleet.providers.ray_slot import SlotSpec
from nestling.fleet.worker_process import OURS, passed_on
from nestling.store import GroupCommit

__all__ = ["RayNode", "RayProvider", "RaySlots", "require_ray"]

_CONNECT_S: Final = 90.0
_END_S: Final = 14.0
_CLOSE_S: Final = 22.0
"""A little more than the gateway takes for its own end."""
_HANG_UP_S: Final = 2.0
_RETRY_S: Final = 2.0

_log = logging.getLogger(__name__)
_from_gateway: msgspec.msgpack.Decoder[FromGateway] = msgspec.msgpack.Decoder(FromGateway)


def require_ray() -> None:
    """Raises `ConfigError` when Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "fleet.kind is ray, but Ray is not installed; fix: pip install 'nestling[ray]' here and "
            "on the nodes, or set fleet.kind to local"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySlots:
    """Where slots live and what runs in them."""

    handlers: str
    """`module:function` that makes the handlers; must be importable on the nodes."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """JSON for that function; `run` and `state` are added on the node. No secrets."""
    private: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Secret files of the worker's state folder, by name."""
    artifacts: ArtifactStore
    """Where what a job's payload names is found."""
    logs: Path
    """Folder for the gateway's log and the last words of lost workers."""
    workers: int
    address: str = ""
    """`host:port` of a cluster's head, `auto` for the one this machine is in; empty starts one."""
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int = 0
    machine: str = "cpu-core"
    lane: str = "cpu"
    beat_s: float = 5.0
    patience_s: float = 600.0
    """How long there may be no worker at all because the cluster is away or has no room."""
    environment: Mapping[str, str] = field(default_factory=dict)


class RayNode:
    """One life of one worker, as the gateway tells it."""

    def __init__(self, name: str, life: int, gateway: _Gateway, slots: RaySlots) -> None:
        self.name = name
        self.life = life
        self.gateway = gateway
        self._slots = slots
        self._bytes = bytearray()
        self._news = asyncio.Event()
        self.is_up = False
        self.has_ended = False
        self._gone: str | None = None

    async def send(self, message: ToWorker) -> None:
        """Hand a message over, and before it what the job needs; `FleetError` when it is gone."""
        if isinstance(message, Work):
            for digest in artifacts_of(message.payload):
                data = await asyncio.to_thread(self._slots.artifacts.get, digest)
                await self._say(Keep(life=self.life, digest=digest, data=data))
        await self._say(Write(life=self.life, data=encode(message)))

    async def receive(self) -> FromWorker:
        """The next message; `FleetError` when the worker is gone. Cancelling loses nothing."""
        while (body := self._take()) is None:
            self._check()
            await self.news()
        return decode_from_worker(body)

    async def last_words(self) -> str:
        """What is known of its end."""
        return self._gone or ""

    async def news(self) -> None:
        """Wait until something changes."""
        await self._news.wait()
        self._news.clear()

    def hear(self, frame: FromGateway) -> None:
        """Take in what the gateway says; called in the event loop."""
        if isinstance(frame, Up):
            self.is_up = True
            _log.info("worker %s runs on node %s", self.name, frame.node)
        elif isinstance(frame, Data):
            self._bytes += frame.data
        elif isinstance(frame, Gone) and self._gone is None:
            self._gone = frame.why
        elif isinstance(frame, Ended):
            self.has_ended = True
            self._gone = self._gone or ""
        self._news.set()

    @property
    def is_gone(self) -> bool:
        """Whether it can do no more."""
        return self._gone is not None

    async def _say(self, frame: ToGateway) -> None:
        self._check()
        await self.gateway.say(frame)

    def _check(self) -> None:
        if self._gone is not None:
            raise FleetError(f"worker {self.name} is gone: {self._gone or '(no last words)'}")

    def _take(self) -> bytes | None:
        if len(self._bytes) < HEADER_BYTES:
            return None
        end = HEADER_BYTES + frame_length(bytes(self._bytes[:HEADER_BYTES]))
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[HEADER_BYTES:end])
        del self._bytes[:end]
        return body


class RayProvider:
    """Starts workers on a Ray cluster."""

    def __init__(self, slots: RaySlots, writer: GroupCommit) -> None:
        require_ray()
        if slots.address.startswith("ray://"):
            raise ConfigError(
                f"fleet.address {slots.address} is Ray Client, which cannot wait for many workers; "
                "expected host:port of the head, from a machine or pod of the cluster"
            )
        self._slots = slots
        path = str(writer.store.path.resolve())
        self._run_id = hashlib.sha256(path.encode()).hexdigest()[:16]
        self._nodes: dict[str, RayNode] = {}
        self._lives = itertools.count(1)
        self._gateway: _Gateway | None = None
        self._opening = asyncio.Lock()
        self._was_connected = False

    @property
    def machine(self) -> str:
        """Machine type in the price table."""
        return self._slots.machine

    @property
    def lane(self) -> str:
        """Which jobs its workers may take."""
        return self._slots.lane

    async def launch(self, name: str) -> RayNode:
        """Start a worker, or return the running one of that name; waits until there is room.

        Raises:
            FleetError: the slot cannot start, the cluster was never reached, or for `patience_s`
                there was neither room nor any other worker.
        """
        node = self._nodes.get(name)
        if node is not None and not node.is_gone:
            return node
        await self.terminate(name)
        end_s = time.monotonic() + self._slots.patience_s
        while True:
            node = await self._try_launch(name, end_s)
            if node is not None:
                return node
            await asyncio.sleep(_RETRY_S)

    async def list(self) -> Sequence[str]:
        """Names of workers that run; Ray has ended those of an earlier controller."""
        return sorted(name for name, node in self._nodes.items() if node.is_up and not node.is_gone)

    async def terminate(self, name: str) -> None:
        """End a worker and everything it started; fine when it is gone already.

        A node that cannot be reached is left to Ray; an answer from there is not heard any more.
        """
        with suppress(TimeoutError):  # we stood still ourselves
            await finish(self._terminate(name))

    async def _terminate(self, name: str) -> None:
        node = self._nodes.pop(name, None)
        if node is None or not node.gateway.is_alive:
            return
        with suppress(FleetError, TimeoutError):
            await node.gateway.say(End(life=node.life))
            async with asyncio.timeout(_END_S):
                while not node.has_ended and node.gateway.is_alive:
                    await node.news()
        node.gateway.forget(node)

    async def sweep(self) -> Sequence[str]:
        """End what an earlier controller's gateway left on this machine; returns the names."""
        marker = self._marker
        found = await asyncio.to_thread(process_tree.tree, None, marker)
        await asyncio.to_thread(process_tree.end_tree, None, marker)
        return ["ray-gateway"] if found else []

    async def close(self) -> None:
        """End every worker and leave the cluster; one that we started ends."""
        self._nodes.clear()
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            await asyncio.to_thread(gateway.close)

    @property
    def _marker(self) -> str:
        return f"{self._run_id}/ray-gateway"

    async def _try_launch(self, name: str, end_s: float) -> RayNode | None:
        """A started worker; None when the cluster went away and it should be tried again."""
        try:
            gateway = await self._open_gateway()
        except FleetError:
            if not self._was_connected or time.monotonic() > end_s:
                raise
            return None
        node = RayNode(name, next(self._lives), gateway, self._slots)
        self._nodes[name] = node
        gateway.add(node)
        with suppress(FleetError):  # then `is_gone` soon
            await gateway.say(Launch(life=node.life, name=name))
        while not node.is_up and not node.is_gone:
            with suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await node.news()
            if await self.list():
                end_s = time.monotonic() + self._slots.patience_s
            elif time.monotonic() > end_s:
                raise self._no_room()
        if not node.is_gone:
            return node
        if gateway.is_alive:
            raise FleetError(f"worker {name} did not start: {await node.last_words()}")
        return None

    def _no_room(self) -> FleetError:
        slots = self._slots
        wants = {"CPU": slots.num_cpus, "GPU": slots.num_gpus, **slots.resources}
        needs = ", ".join(f"{name} {number:g}" for name, number in wants.items() if number)
        has = self._gateway.summary if self._gateway is not None else "nothing"
        return FleetError(
            f"no room on the Ray cluster for {slots.patience_s:g} s; a worker needs {needs}; the "
            f"cluster had {has} in all; add nodes, end other work, or ask for less in [fleet]"
        )

    async def _open_gateway(self) -> _Gateway:
        async with self._opening:
            if self._gateway is not None and self._gateway.is_alive:
                return self._gateway
            if self._gateway is not None:
                _log.warning("the connection to Ray was lost; connecting again")
                await asyncio.to_thread(self._gateway.close)
            self._gateway = gateway = _Gateway(self._slots.logs, self._marker)
            await gateway.connect(self._connect())
            self._was_connected = True
            return gateway

    def _connect(self) -> Connect:
        slots = self._slots
        return Connect(
            address=slots.address,
            namespace=f"nestling-{self._run_id}",
            workers=slots.workers,
            num_cpus=slots.num_cpus,
            num_gpus=slots.num_gpus,
            resources=dict(slots.resources),
            memory_bytes=slots.memory_bytes,
            spec=SlotSpec(
                run_id=self._run_id,
                handlers=slots.handlers,
                settings=dict(slots.settings),
                beat_s=slots.beat_s,
                environment=dict(slots.environment),
            ),
            private=dict(slots.private),
        )


class _Gateway:
    """The gateway's process, its pipes, and the nodes that listen."""

    def __init__(self, logs: Path, marker: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._marker = marker
        self._nodes: dict[int, RayNode] = {}
        self._answer: asyncio.Future[FromGateway] = self._loop.create_future()
        self._writing = threading.Lock()
        self._log = logs / "ray-gateway.log"
        self.is_alive = True
        self.summary = ""
        logs.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nestling.fleet.providers.ray_gateway"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment() | {process_tree.MARKER: marker},
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name="ray-gateway", daemon=True)
        self._reader.start()

    async def connect(self, connect: Connect) -> None:
        """Join the cluster; `FleetError` when that fails."""
        why = f"no answer within {_CONNECT_S:g} s"
        try:
            await self.say(connect)
            async with asyncio.timeout(_CONNECT_S):
                answer = await asyncio.shield(self._answer)
            if isinstance(answer, Connected):
                self.summary = answer.summary
                return
            why = (
                answer.why if isinstance(answer, Refused) else f"its process ended; see {self._log}"
            )
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            await asyncio.to_thread(self.close, at_once=True)
            raise
        await asyncio.to_thread(self.close, at_once=True)
        where = (
            f"the Ray cluster at {connect.address}" if connect.address else "a local Ray cluster"
        )
        raise FleetError(
            f"cannot join {where}: {why}; expected a running head of the same Ray and Python "
            f"version that this machine can reach; check fleet.address and `ray status`"
        )

    async def say(self, frame: ToGateway) -> None:
        """Hand a frame over; `FleetError` when the gateway is gone."""
        await asyncio.to_thread(self._write, pack(frame))

    def add(self, node: RayNode) -> None:
        """Let a node hear what is said about its life."""
        self._nodes[node.life] = node
        if not self.is_alive:
            self._lost()

    def forget(self, node: RayNode) -> None:
        """Drop a node that is over."""
        self._nodes.pop(node.life, None)

    def close(self, *, at_once: bool = False) -> None:
        """End the process, by its own doing if it can, and whatever it started; blocks."""
        self.is_alive = False
        if self._hang_up(_HANG_UP_S) and not at_once:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_S)
        process_tree.end_tree(self._process.pid, self._marker)
        self._process.wait()
        self._hang_up()
        self._reader.join()

    def _hang_up(self, limit_s: float = -1) -> bool:
        """Close its input; False while somebody still writes, whom a gateway that reads nothing holds up."""
        if not self._writing.acquire(timeout=limit_s):
            return False
        try:
            with suppress(OSError):
                cast("BinaryIO", self._process.stdin).close()
        finally:
            self._writing.release()
        return True

    def _write(self, data: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            with self._writing:
                stdin.write(data)
                stdin.flush()
        except (OSError, ValueError) as error:
            raise FleetError(f"the connection to Ray is lost; its log is {self._log}") from error

    def _read(self) -> None:
        # The loop may be closed before we are.
        with cast("BinaryIO", self._process.stdout) as stdout, suppress(RuntimeError):
            for body in read_frames(stdout):
                self._loop.call_soon_threadsafe(self._hear, _from_gateway.decode(body))
            self._loop.call_soon_threadsafe(self._lost)

    def _hear(self, frame: FromGateway) -> None:
        if isinstance(frame, Connected | Refused):
            if not self._answer.done():
                self._answer.set_result(frame)
            return
        node = self._nodes.get(frame.life)
        if node is not None:
            node.hear(frame)

    def _lost(self) -> None:
        self.is_alive = False
        if not self._answer.done():
            self._answer.set_result(Gone(life=0, why=""))
        for node in self._nodes.values():
            node.hear(Gone(life=node.life, why="the connection to the Ray cluster was lost"))


def _environment() -> dict[str, str]:
    """What the gateway, and a cluster that it starts, get of our environment."""
    rays = {key: value for key, value in os.environ.items() if key.startswith("RAY_")}
    paths = {key: os.environ[key] for key in ("PYTHONPATH",) if key in os.environ}
    return {"RAY_USAGE_STATS_ENABLED": "0"} | passed_on(OURS) | paths | rays
