"""The controller's end of one pod: what waits to be told, what was heard, and when."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque

import msgspec

from nestling.core.clock import Clock
from nestling.core.errors import FleetError
from nestling.fleet.messages import (
    Done,
    Failed,
    FromWorker,
    Ready,
    ToWorker,
    Work,
    decode_from_worker,
)
from nestling.fleet.pods.wire import (
    BlobSaid,
    ChildGone,
    FromPod,
    Inbox,
    Outbox,
    Restart,
    Said,
    Seen,
    Tell,
    ToPod,
)

__all__ = ["MAX_BLOB_BYTES", "PodLink"]

MAX_BLOB_BYTES = 64 * 1024 * 1024


class PodLink:
    """One life of one pod; used from the event loop only."""

    def __init__(self, name: str, life: str, clock: Clock) -> None:
        self.name = name
        self.life = life
        self.generation = 1
        self.heard_s = clock.monotonic()
        """When anything came from it last."""
        self.num_done = 0
        """Jobs of the present generation that were answered."""
        self.num_restarts = 0
        """Of the worker process since a job was answered."""
        self.is_leaving = False
        """The pod said that it ends itself."""
        self.is_ready = False
        """The worker process of this generation waits for work or does some."""
        self.busy_with: str | None = None
        """Id of the job it was given and has not answered."""
        self.is_parked = False
        """A request of the pod waits here for messages."""
        self.artifacts: set[str] = set()
        """What it may fetch: bundles of the job it was given."""
        self._clock = clock
        self._waiting: deque[ToPod] = deque()
        self._seq = 0
        self._next: int | None = None
        self._heard: deque[FromWorker] = deque()
        self._news = asyncio.Event()
        self._more = asyncio.Event()
        self._gone: str | None = None
        self._words = ""
        self._blobs: dict[str, bytearray] = {}

    @property
    def gone(self) -> str | None:
        """Why its worker can do no more; None while it can."""
        return self._gone

    @property
    def words(self) -> str:
        """What is known of its end."""
        return self._words or self._gone or ""

    def note_life(self) -> None:
        """A request of the pod came in."""
        self.heard_s = self._clock.monotonic()

    def tell(self, message: ToWorker) -> None:
        """Queue a message for the worker; `FleetError` when it is gone."""
        self._check()
        if isinstance(message, Work):
            self.busy_with = message.job_id
        self._put(Tell(seq=self._seq + 1, message=msgspec.Raw(msgspec.json.encode(message))))

    def restart(self) -> None:
        """Have the worker process replaced on the same pod; what the old one says is dropped."""
        self.generation += 1
        self.num_restarts += 1
        self._gone, self._words, self.is_ready, self.num_done = None, "", False, 0
        self.busy_with = None
        self.artifacts.clear()
        self._heard.clear()
        self._waiting.clear()
        self._put(Restart(seq=self._seq + 1, generation=self.generation))

    def end(self, why: str, words: str = "") -> None:
        """Nothing more comes of this worker."""
        if self._gone is None:
            self._gone = why
            self._words = words
        self._news.set()
        self._more.set()

    async def receive(self) -> FromWorker:
        """The next message; `FleetError` when the worker is gone. Cancelling loses nothing."""
        while not self._heard:
            self._check()
            self._news.clear()
            await self._news.wait()
        return self._heard.popleft()

    async def inbox(self, after: int, wait_s: float) -> Inbox:
        """Messages after a number; when there is none, waits for one, at most `wait_s`."""
        while self._waiting and self._waiting[0].seq <= after:
            self._waiting.popleft()
        if not self._waiting:  # also when its worker is gone, or the pod would ask again at once
            self._more.clear()
            self.is_parked = True
            try:
                async with asyncio.timeout(wait_s):
                    await self._more.wait()
            except TimeoutError:
                pass
            finally:
                self.is_parked = False
        return Inbox(items=list(self._waiting))

    def take(self, outbox: Outbox) -> Seen:
        """Messages of the pod; those that came before are passed over."""
        if self._next is None:
            self._next = outbox.first
        for number, item in enumerate(outbox.items, start=outbox.first):
            if number == self._next:
                self._next += 1
                self._hear(item)
        return Seen(next=self._next)

    def blob_size(self, digest: str) -> int:
        """Bytes of an upload that have arrived."""
        return len(self._blobs.get(digest, b""))

    def add_piece(self, digest: str, offset: int, total: int, data: bytes) -> int:
        """The next piece of an upload; returns the size that has arrived. Repeats change nothing.

        Raises `FleetError` for an upload that is too large or does not match its name.
        """
        if total > MAX_BLOB_BYTES:
            raise FleetError(f"an upload of {total} bytes; expected at most {MAX_BLOB_BYTES}")
        if digest not in self._blobs:
            self._blobs = {digest: bytearray()}  # one at a time; an abandoned one is forgotten
        blob = self._blobs[digest]
        if offset == len(blob) and offset + len(data) <= total:
            blob += data
        if len(blob) == total and hashlib.sha256(blob).hexdigest() != digest:
            del self._blobs[digest]
            raise FleetError(f"upload {digest} arrived damaged; it is sent again")
        return len(blob)

    def _put(self, item: ToPod) -> None:
        self._seq += 1
        self._waiting.append(item)
        self._more.set()

    def _hear(self, item: FromPod) -> None:
        if isinstance(item, Said | BlobSaid | ChildGone) and item.generation != self.generation:
            return
        if isinstance(item, ChildGone):
            self.end("its worker process ended", item.words)
        elif isinstance(item, Said):
            self._message(bytes(item.message))
        elif isinstance(item, BlobSaid):
            self._message(bytes(self._blobs.pop(item.digest, b"")))
        else:
            self.is_leaving = True
            self.end(f"the pod ends itself: {item.why}")

    def _message(self, body: bytes) -> None:
        try:
            message = decode_from_worker(body)
        except FleetError as error:
            self.end(str(error))
            return
        if isinstance(message, Ready):
            self.is_ready = True
        elif isinstance(message, Done | Failed):
            self.busy_with = None
            self.artifacts.clear()
            self.num_done += 1
            self.num_restarts = 0
        self._heard.append(message)
        self._news.set()

    def _check(self) -> None:
        if self._gone is not None:
            raise FleetError(f"pod {self.name} is gone: {self._gone}")
