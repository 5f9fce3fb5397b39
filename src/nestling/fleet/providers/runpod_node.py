"""One life of the worker process of one pod, as the pool sees it."""

from __future__ import annotations

from nestling.core.errors import FleetError
from nestling.fleet.messages import FromWorker, Stop, ToWorker, Work, artifacts_of
from nestling.fleet.pods.link import PodLink

__all__ = ["PodNode"]


class PodNode:
    """One life of the worker process of one pod."""

    def __init__(self, name: str, link: PodLink, machine: str) -> None:
        self.name = name
        self.machine = machine
        """What it really is, for its price: one of the ladder."""
        self.link = link
        self.is_told_to_stop = False
        self._generation = link.generation

    async def send(self, message: ToWorker) -> None:
        """Hand a message over; `FleetError` when the worker is gone."""
        self._check()
        if isinstance(message, Work):
            self.link.artifacts.update(artifacts_of(message.payload))  # it may fetch these
        self.is_told_to_stop |= isinstance(message, Stop)
        self.link.tell(message)

    async def receive(self) -> FromWorker:
        """The next message; `FleetError` when the worker is gone. Cancelling loses nothing."""
        self._check()
        return await self.link.receive()

    async def last_words(self) -> str:
        """What is known of its end."""
        return self.link.words

    def _check(self) -> None:
        if self.link.generation != self._generation:
            raise FleetError(f"worker {self.name} was replaced on its pod")
