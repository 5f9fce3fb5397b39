"""The process that speaks to Ray for one controller: frames on its pipes, actor calls behind.

    python -m nestling.fleet.providers.ray_gateway

Ray ends the process that is connected to it when the cluster's head or the local raylet is lost for
good, so that process must not be the controller. When this one dies, the controller has lost its
workers and nothing else; it starts another gateway and connects again. The actors belong to this
process: Ray ends them with it.

The first frame is `Connect` and is answered by `Connected` or `Refused`. From then on every frame
names the life it is about; one launch is one life. The end of standard input is the end of all.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from nestling.fleet.providers.ray_slot import PIECE_BYTES, Slot, SlotSpec

__all__ = [
    "Connect",
    "Connected",
    "Data",
    "End",
    "Ended",
    "FromGateway",
    "Gone",
    "Keep",
    "Launch",
    "Refused",
    "ToGateway",
    "Up",
    "Write",
    "pack",
    "read_frames",
]

_HEADER_BYTES: Final = 4
_STOP_S: Final = 8.0
"""For one slot to end its worker."""
_EXIT_S: Final = 18.0
"""From the end of standard input to the end of this process, whatever hangs."""
_OBJECT_STORE_BYTES: Final = 80_000_000
"""Of a cluster that we start ourselves, per Ray's minimum; nothing of ours is kept there."""
_CONCURRENT_CALLS: Final = 6


class _Frame(msgspec.Struct, frozen=True, kw_only=True, tag=str.lower):
    """Base of all frames."""


class Connect(_Frame, frozen=True, kw_only=True):
    """Which cluster, and what its slots are."""

    address: str
    """Empty: start one here."""
    namespace: str
    workers: int
    num_cpus: float
    num_gpus: float
    resources: dict[str, float]
    memory_bytes: int
    spec: SlotSpec
    private: dict[str, bytes]


class Launch(_Frame, frozen=True, kw_only=True):
    """Start a worker, as soon as there is room."""

    life: int
    name: str


class Write(_Frame, frozen=True, kw_only=True):
    """Bytes for a worker."""

    life: int
    data: bytes


class Keep(_Frame, frozen=True, kw_only=True):
    """An artifact that a worker is going to need."""

    life: int
    digest: str
    data: bytes


class End(_Frame, frozen=True, kw_only=True):
    """End a worker; answered by `Ended`."""

    life: int


class Connected(_Frame, frozen=True, kw_only=True):
    """In the cluster."""

    summary: str


class Refused(_Frame, frozen=True, kw_only=True):
    """Not in the cluster."""

    why: str


class Up(_Frame, frozen=True, kw_only=True):
    """A worker was placed and started."""

    life: int
    node: str


class Data(_Frame, frozen=True, kw_only=True):
    """Bytes of a worker."""

    life: int
    data: bytes


class Gone(_Frame, frozen=True, kw_only=True):
    """A worker ended by itself, its actor died, or its node is lost."""

    life: int
    why: str


class Ended(_Frame, frozen=True, kw_only=True):
    """Nothing is left of a worker, as far as its node can be reached."""

    life: int


ToGateway = Connect | Launch | Write | Keep | End
FromGateway = Connected | Refused | Up | Data | Gone | Ended

_encoder = msgspec.msgpack.Encoder()
_to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)


def pack(frame: ToGateway | FromGateway) -> bytes:
    """A frame with its length in front."""
    body = _encoder.encode(frame)
    return len(body).to_bytes(_HEADER_BYTES, "big") + body


def read_frames(stream: BinaryIO) -> Iterator[bytes]:
    """Bodies of frames until the stream ends."""
    while len(header := stream.read(_HEADER_BYTES)) == _HEADER_BYTES:
        length = int.from_bytes(header, "big")
        body = stream.read(length)
        if len(body) < length:
            return
        yield body


def main() -> int:
    """Entry point of the process."""
    requests, answers = _take_pipes()
    frames = map(_to_gateway.decode, read_frames(requests))
    connect = next(frames, None)
    if not isinstance(connect, Connect):
        return 2
    say = _Say(answers)
    folder = tempfile.mkdtemp(prefix="nray-") if not connect.address else None
    if folder is not None:
        _use_token(Path(folder) / "token")
    try:
        import ray

        try:
            summary = _join(ray, connect, folder)
        except Exception as error:  # noqa: BLE001 (Ray raises all sorts; the controller reports it)
            say(Refused(why=f"{type(error).__name__}: {error}"))
            return 1
        say(Connected(summary=summary))
        asyncio.run(_serve(ray, connect, frames, say))
        ray.shutdown()
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _join(ray: Any, connect: Connect, folder: str | None) -> str:  # noqa: ANN401 (the module)
    """Connect, or start a cluster of one node, and end what an earlier gateway left there.

    Returns what the cluster has.
    """
    options: dict[str, Any] = {"address": connect.address}
    if folder is not None:
        options = {
            "address": "local",
            "num_cpus": math.ceil(connect.workers * connect.num_cpus),
            "resources": {name: n * connect.workers for name, n in connect.resources.items()},
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_temp_dir": folder,
        }
    ray.init(namespace=connect.namespace, log_to_driver=False, **options)
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == connect.namespace:
            with suppress(ValueError):
                ray.kill(ray.get_actor(actor["name"]))
    has = ray.cluster_resources()
    return ", ".join(f"{name} {has[name]:g}" for name in sorted(has) if ":" not in name)


def _use_token(path: Path) -> None:
    """Let nobody else into a cluster of ours; Ray reads this when it is imported."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


class _Say:
    """Writes frames; the controller reads all the time. Its end is ours."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def __call__(self, frame: FromGateway) -> None:
        try:
            self._stream.write(pack(frame))
            self._stream.flush()
        except BrokenPipeError:
            os._exit(1)


async def _serve(
    ray: Any,  # noqa: ANN401
    connect: Connect,
    frames: Iterator[ToGateway],
    say: Callable[[FromGateway], None],
) -> None:
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[ToGateway | None] = asyncio.Queue()

    def read() -> None:
        for frame in frames:
            loop.call_soon_threadsafe(queue.put_nowait, frame)
        loop.call_soon_threadsafe(queue.put_nowait, None)
        threading.Event().wait(_EXIT_S)
        os._exit(1)

    threading.Thread(target=read, name="requests", daemon=True).start()
    actors = _actor_class(ray, connect)
    lives: dict[int, tuple[_Life, asyncio.Task[None]]] = {}
    async with asyncio.TaskGroup() as group:
        while (frame := await queue.get()) is not None:
            if isinstance(frame, Launch):
                life = _Life(ray, frame, connect, actors, say)
                lives[frame.life] = life, group.create_task(life.run())
            elif isinstance(frame, Write | Keep) and frame.life in lives:
                lives[frame.life][0].inbox.put_nowait(frame)
            elif isinstance(frame, End):
                _, task = lives.pop(frame.life, (None, None))
                if task is not None:
                    task.cancel()
        for _, task in lives.values():
            task.cancel()


def _actor_class(ray: Any, connect: Connect) -> Any:  # noqa: ANN401
    """A slot's actor: never restarted and never called twice by Ray, as our queue does that."""
    options: dict[str, Any] = {
        "num_cpus": connect.num_cpus,
        "num_gpus": connect.num_gpus,
        "resources": connect.resources,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": _CONCURRENT_CALLS,
    }
    if connect.memory_bytes:
        options["memory"] = connect.memory_bytes
    return ray.remote(**options)(Slot)


class _Life:
    """One worker from launch to end."""

    def __init__(
        self,
        ray: Any,  # noqa: ANN401
        launch: Launch,
        connect: Connect,
        actors: Any,  # noqa: ANN401
        say: Callable[[FromGateway], None],
    ) -> None:
        self.inbox: asyncio.Queue[Write | Keep] = asyncio.Queue()
        self._ray = ray
        self._launch = launch
        self._connect = connect
        self._actors = actors
        self._say = say
        self._up = False

    async def run(self) -> None:
        """Cancelled when the worker must go."""
        life, name = self._launch.life, self._launch.name
        actor = None
        try:
            actor = self._actors.options(name=f"{name}.{life}").remote()
            await self._relay(actor)
        finally:
            if actor is not None:
                await self._end(actor)
            self._say(Ended(life=life))

    async def _relay(self, actor: Any) -> None:  # noqa: ANN401
        life = self._launch.life
        why = ""
        try:
            await self._begin(actor)
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(self._write(actor))
                while data := await actor.receive.remote():
                    self._say(Data(life=life, data=data))
                writing.cancel()
            with suppress(Exception):
                async with asyncio.timeout(_STOP_S):
                    why = await actor.last_words.remote()
        except Exception as error:  # noqa: BLE001 (whatever Ray raises, this worker is lost)
            why = _reason(error)
        self._say(Gone(life=life, why=why))
        await asyncio.Event().wait()  # until the controller ends it

    async def _begin(self, actor: Any) -> None:  # noqa: ANN401
        connect = self._connect
        node = await actor.node.remote()
        self._up = True
        pid = await actor.start.remote(self._launch.name, connect.spec, connect.private, node)
        self._say(Up(life=self._launch.life, node=f"{node[:12]} pid {pid}"))

    async def _write(self, actor: Any) -> None:  # noqa: ANN401
        while True:
            frame = await self.inbox.get()
            for start in range(0, max(1, len(frame.data)), PIECE_BYTES):
                piece = frame.data[start : start + PIECE_BYTES]
                if isinstance(frame, Write):
                    await actor.send.remote(piece)
                else:
                    last = start + PIECE_BYTES >= len(frame.data)
                    await actor.keep.remote(frame.digest, piece, last)

    async def _end(self, actor: Any) -> None:  # noqa: ANN401
        """Have the slot end its worker, then end the slot; an actor without a place is only let go."""
        if self._up:
            with suppress(Exception):
                async with asyncio.timeout(_STOP_S):
                    await actor.stop.remote()
        with suppress(Exception):
            await asyncio.to_thread(self._ray.kill, actor)


def _reason(error: BaseException) -> str:
    """What a slot or Ray said, without the traceback that Ray adds."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause = getattr(error, "cause", None)
    return str(cause) if isinstance(cause, Exception) else f"{type(error).__name__}: {error}"


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep stdin and stdout for frames; what Ray prints goes to stderr. Children inherit neither."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return os.fdopen(requests, "rb"), os.fdopen(answers, "wb")


if __name__ == "__main__":
    sys.exit(main())
