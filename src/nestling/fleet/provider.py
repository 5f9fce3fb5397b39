"""Where workers run: a provider starts, lists and ends them by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from nestling.core.errors import FleetError
from nestling.fleet.messages import FromWorker, ToWorker

__all__ = ["Node", "Provider", "TypedNode", "WorkerEndedError"]


class WorkerEndedError(FleetError):
    """The provider itself ended a worker, because of the job that it was doing."""

    def __init__(self, reason: str, detail: str, *, retry: bool) -> None:
        super().__init__(detail)
        self.reason = reason
        """Stable code for the job's outcome."""
        self.detail = detail
        self.retry = retry
        """Whether another worker should try."""


class Node(Protocol):
    """One running worker and the way to talk to it."""

    @property
    def name(self) -> str:
        """Chosen by the caller of `launch`."""
        ...

    async def send(self, message: ToWorker) -> None:
        """Hand a message over; `FleetError` when the worker is gone."""
        ...

    async def receive(self) -> FromWorker:
        """The next message; `FleetError` when the worker is gone. Cancelling loses nothing.

        `WorkerEndedError` says that the provider ended it, and why.
        """
        ...

    async def last_words(self) -> str:
        """The end of its log, for an error message; empty when there is none."""
        ...


@runtime_checkable
class TypedNode(Protocol):
    """A node whose machine type is known only once it runs: the provider takes what it gets."""

    @property
    def machine(self) -> str:
        """Machine type in the price table."""
        ...


class Provider(Protocol):
    """Starts and ends workers. Names are chosen before launch, so that a crash can be cleaned up."""

    @property
    def machine(self) -> str:
        """Machine type in the price table; of several, the dearest (see `TypedNode`)."""
        ...

    @property
    def lane(self) -> str:
        """Which jobs its workers may take."""
        ...

    async def launch(self, name: str) -> Node:
        """Start a worker, or return the running one of that name."""
        ...

    async def list(self) -> Sequence[str]:
        """Names of workers that run, also those that an earlier controller left behind."""
        ...

    async def terminate(self, name: str) -> None:
        """End a worker and everything it started; fine when it is gone already."""
        ...

    async def sweep(self) -> Sequence[str]:
        """End what an earlier controller of this run left behind; returns the names."""
        ...

    async def close(self) -> None:
        """End every worker; may be called twice."""
        ...
