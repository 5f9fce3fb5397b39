"""Looks at all pods of an account, whatever runs know of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

__all__ = ["PodLine", "PodList", "Swept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodLine:
    """One pod."""

    name: str
    id: str
    status: str
    usd_per_hour: float
    up_s: float
    """Since its container was started; 0 before."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What a broom did."""

    ended: list[str]
    left: list[str]
    """Pods that could not be proved gone in time."""


class PodList(Protocol):
    """The pods of an account whose names begin with a prefix."""

    async def pods(self, prefix: str) -> list[PodLine]:
        """Those that exist; `FleetError` when the account cannot be read."""
        ...

    async def end_all(self, prefix: str, *, limit_s: float, told: Callable[[str], None]) -> Swept:
        """Terminate them all, then look until list and addresses show nothing more."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...
