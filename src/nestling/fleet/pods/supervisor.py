"""One life of a pod: enrol, fetch, relay, wipe, replace the worker process, and know when to leave.

Jobs are done by an ordinary `fleet.worker` process with the ordinary handlers, so they give what
they give on any other machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
from collections import deque
from contextlib import suppress

import msgspec

from nestling.core.clock import Clock
from nestling.fleet.messages import (
    Done,
    Failed,
    Ready,
    Stop,
    Work,
    artifacts_of,
    decode_from_worker,
    decode_to_worker,
)
from nestling.fleet.pods.boot import Boot
from nestling.fleet.pods.child import PodChild, PodFolder
from nestling.fleet.pods.client import ChannelLostError, NotEnrolledError, PodClient
from nestling.fleet.pods.pins import found_pins
from nestling.fleet.pods.wire import (
    BLOB_FROM_BYTES,
    BlobSaid,
    ChildGone,
    FromPod,
    Leaving,
    Refusal,
    Restart,
    Said,
    ToPod,
    WorkSpec,
)

__all__ = ["Supervisor"]

_PAUSE_S = 0.2
_MAX_PAUSE_S = 5.0

_log = logging.getLogger(__name__)


class _Leave(Exception):  # noqa: N818 (not an error: the pod is done)
    """The pod is to end."""


class Supervisor:
    """One life of one pod."""

    def __init__(
        self, boot: Boot, boot_key: bytes, client: PodClient, folder: PodFolder, clock: Clock
    ) -> None:
        self._boot = boot
        self._boot_key = boot_key
        self._client = client
        self._folder = folder
        self._clock = clock
        self._life = secrets.token_hex(8)
        self._session = ""
        self._spec: WorkSpec | None = None
        self._child: PodChild | None = None
        self._readers: asyncio.TaskGroup | None = None
        self._after = 0
        self._first = 1
        self._unsaid: deque[FromPod] = deque()
        self._news = asyncio.Event()
        self._born_s = self._heard_s = self._busy_s = clock.monotonic()

    async def run(self) -> str:
        """Serve until the pod is to end; returns why."""
        try:
            await self._enrol()
            async with asyncio.TaskGroup() as group:
                self._readers = group
                await self._new_child(1)
                group.create_task(self._say_on())
                group.create_task(self._watch())
                group.create_task(self._listen())
        except BaseExceptionGroup as errors:
            leaving, rest = errors.split(_Leave)
            if leaving is None or rest is not None:
                raise
            why = str(_first(leaving))
        except _Leave as leave:
            why = str(leave)
        if self._child is not None:
            await self._child.end()
        with suppress(ChannelLostError, NotEnrolledError):
            await self._client.say(self._first, [*self._unsaid, Leaving(why=why)])
        return why

    async def _enrol(self) -> None:
        """Until a controller lets us in; `_Leave` when it refuses or none answers."""
        found = await asyncio.to_thread(found_pins, self._boot.pins)
        pause_s = _PAUSE_S
        while True:
            try:
                answer = await self._client.enrol(
                    self._boot.name, self._life, self._boot_key, found
                )
                break
            except (ChannelLostError, NotEnrolledError) as error:
                _log.warning("no controller yet: %s", error)
            self._require_controller()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        if isinstance(answer, Refusal):
            raise _Leave(f"refused: {answer.reason}; {answer.detail}")
        self._heard_s = self._clock.monotonic()
        self._spec = answer.spec
        if answer.session == self._session:
            return
        self._session, self._after, self._first = answer.session, 0, 1
        self._unsaid.clear()
        self._folder.make(answer.spec.private)
        if self._child is not None:
            await self._join(self._child)

    async def _join(self, child: PodChild) -> None:
        """A new controller: a worker that starts or waits goes on, one with old work does not."""
        if child.is_busy or child.is_gone:
            self._child = None
            await child.end()
            await self._new_child(1)
            return
        child.generation = 1
        if child.is_ready:
            self._say(Said(generation=1, message=_ready()))

    async def _new_child(self, generation: int) -> None:
        assert self._spec is not None
        assert self._readers is not None
        self._folder.wipe()
        self._child = await PodChild.start(generation, self._boot.name, self._spec, self._folder)
        self._busy_s = self._clock.monotonic()
        self._readers.create_task(self._relay(self._child))

    async def _relay(self, child: PodChild) -> None:
        """What the worker process says, until it ends."""
        while (body := await child.receive()) is not None:
            message = decode_from_worker(body)
            if isinstance(message, Ready):
                self._folder.keep_present()
                child.is_ready = True
            elif isinstance(message, Done | Failed):
                self._folder.wipe()
                child.is_busy = False
            self._busy_s = self._clock.monotonic()
            if child is self._child:
                self._say(Said(generation=child.generation, message=msgspec.Raw(body)))
        child.is_gone = True
        child.is_ready = child.is_busy = False
        if child is self._child:
            self._say(ChildGone(generation=child.generation, words=child.last_words()))

    async def _listen(self) -> None:
        """Take messages from the controller and do what they say."""
        pause_s = _PAUSE_S
        while True:
            try:
                inbox = await self._client.inbox(self._after)
            except NotEnrolledError:
                await self._enrol()
                continue
            except ChannelLostError as error:
                _log.warning("%s", error)
                self._require_controller()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                continue
            self._heard_s = self._clock.monotonic()
            pause_s = _PAUSE_S
            session = self._session
            for item in inbox.items:
                await self._obey(item)
                if session != self._session:
                    break  # the rest was for a controller that is gone
                self._after = item.seq

    async def _obey(self, item: ToPod) -> None:
        child = self._child
        assert child is not None
        if isinstance(item, Restart):
            self._child = None
            await child.end()
            await self._new_child(item.generation)
            return
        body = bytes(item.message)
        message = decode_to_worker(body)
        if isinstance(message, Work):
            child.is_busy = True
            if not await self._fetch(message):
                return
        await child.send(body)
        if isinstance(message, Stop):
            await child.stopped()
            raise _Leave("told to stop")

    async def _fetch(self, work: Work) -> bool:
        """Bring what a job needs; what cannot be had fails the job, in the worker's words.

        False: the controller that gave this job is gone.
        """
        session = self._session
        for digest in artifacts_of(work.payload):
            so_far = bytearray()
            while not self._folder.artifacts.has(digest):
                try:
                    data = await self._client.fetch(digest, so_far)
                except NotEnrolledError:
                    await self._enrol()
                    if session != self._session:
                        return False
                    continue
                except ChannelLostError as error:
                    _log.warning("%s", error)
                    self._require_controller()
                    await asyncio.sleep(_PAUSE_S)
                    continue
                if data is None:
                    break
                self._heard_s = self._clock.monotonic()
                self._folder.artifacts.put(data)
        return True

    def _say(self, item: FromPod) -> None:
        self._unsaid.append(item)
        self._news.set()

    async def _say_on(self) -> None:
        """Hand over what there is to say, again until it has arrived."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._unsaid:
                session, items = self._session, self._batch()
                try:
                    sent = [await self._small(item) for item in items]
                    reached = await self._client.say(self._first, sent)
                except NotEnrolledError:
                    await asyncio.sleep(_PAUSE_S)  # `_listen` enrols again
                    continue
                except ChannelLostError as error:
                    _log.warning("%s", error)
                    await asyncio.sleep(_PAUSE_S)
                    continue
                if session != self._session:
                    continue
                self._heard_s = self._clock.monotonic()
                for _ in range(min(reached - self._first, len(items))):
                    self._unsaid.popleft()
                    self._first += 1

    def _batch(self) -> list[FromPod]:
        """What goes into one request: small messages, or a single large one, as one upload is kept at a time."""
        chosen: list[FromPod] = []
        size = 0
        for item in self._unsaid:
            size += len(bytes(item.message)) if isinstance(item, Said) else 0
            if chosen and size > BLOB_FROM_BYTES:
                break
            chosen.append(item)
        return chosen

    async def _small(self, item: FromPod) -> FromPod:
        """The message, or its name once a large one was uploaded."""
        if not isinstance(item, Said) or len(bytes(item.message)) < BLOB_FROM_BYTES:
            return item
        data = bytes(item.message)
        digest = hashlib.sha256(data).hexdigest()
        await self._client.upload(digest, data)
        return BlobSaid(generation=item.generation, digest=digest)

    async def _watch(self) -> None:
        """The limits that end a pod whatever its controller does."""
        assert self._spec is not None
        every_s = min(1.0, self._spec.limits.idle_s / 4, self._spec.limits.lost_controller_s / 4)
        while True:
            await asyncio.sleep(every_s)
            limits, now_s = self._spec.limits, self._clock.monotonic()
            child = self._child
            self._require_controller()
            if now_s - self._born_s > limits.max_age_s:
                raise _Leave(f"older than {limits.max_age_s:g} s")
            if (child is None or not child.is_busy) and now_s - self._busy_s > limits.idle_s:
                raise _Leave(f"idle for {limits.idle_s:g} s")

    def _require_controller(self) -> None:
        spec = self._spec
        limit_s = spec.limits.lost_controller_s if spec else self._boot.lost_controller_s
        if self._clock.monotonic() - self._heard_s > limit_s:
            raise _Leave(f"no controller for {limit_s:g} s")


def _ready() -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(Ready(pid=os.getpid())))


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
