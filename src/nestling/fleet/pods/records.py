"""What a run remembers of its pods, in its run store: wanted before they are asked for.

One JSON document under one key, rewritten in the transaction of the event that tells the change, so
a crash at any point leaves each pod in exactly one state. Pods that are over live on in the events
and in the sum of what was spent.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from nestling.core.clock import Clock
from nestling.core.errors import FleetError
from nestling.store import GroupCommit

__all__ = ["PodRecord", "PodRecords", "PodState", "PodSums"]

PodState = Literal["wanted", "made", "ready", "ending"]
"""wanted: asked for, perhaps made; made: has an id; ready: its worker spoke; ending: to be gone."""

_PODS = "fleet.pods"
_RUN_ID = "fleet.run_id"


class PodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One pod as this run knows it."""

    name: str
    gpu: str
    """Name in the price table."""
    cloud: str
    usd_per_hour: float
    """The rung's cap until the API says what it costs."""
    state: PodState
    wanted_at: float
    """Seconds since the epoch; so are the others."""
    pod_id: str = ""
    made_at: float = 0.0
    ready_at: float = 0.0
    life: str = ""
    why: str = ""
    """Why it is ending."""

    def spent_usd(self, now: float) -> float:
        """Cost up to a moment; billed from creation, as far as is known."""
        return max(0.0, now - self.made_at) / 3600 * self.usd_per_hour if self.made_at else 0.0


class _Document(msgspec.Struct, kw_only=True):
    pods: dict[str, PodRecord] = msgspec.field(default_factory=dict)
    spent_usd: dict[str, float] = msgspec.field(default_factory=dict)
    hours: dict[str, float] = msgspec.field(default_factory=dict)
    num_made: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSums:
    """Of pods that are over, by GPU."""

    spent_usd: dict[str, float]
    hours: dict[str, float]
    num_made: int


class PodRecords:
    """The pods of a run; every change is on disk when it returns. One controller writes."""

    def __init__(self, writer: GroupCommit, clock: Clock) -> None:
        self._writer = writer
        self._clock = clock
        text = writer.store.meta(_PODS)
        self._document = (
            msgspec.json.decode(text, type=_Document) if text is not None else _Document()
        )

    async def run_id(self) -> str:
        """Random name of this run in pod names, made once."""

        def get_or_make() -> str:
            store = self._writer.store
            found = store.meta(_RUN_ID)
            if found is None:
                found = secrets.token_hex(4)
                store.set_meta(_RUN_ID, found)
            return found

        return await self._writer.run(get_or_make)

    def all(self) -> list[PodRecord]:
        """Pods that are not known to be gone."""
        return list(self._document.pods.values())

    def get(self, name: str) -> PodRecord | None:
        """One of them."""
        return self._document.pods.get(name)

    def sums(self) -> PodSums:
        """What pods that are over have cost."""
        document = self._document
        return PodSums(
            spent_usd=dict(document.spent_usd),
            hours=dict(document.hours),
            num_made=document.num_made,
        )

    def spent_usd(self) -> float:
        """Cost of all pods of the run up to now."""
        now = self._clock.now()
        live = sum(record.spent_usd(now) for record in self.all())
        return live + sum(self._document.spent_usd.values())

    async def want(self, name: str, *, gpu: str, cloud: str, usd_per_hour: float) -> None:
        """Remember a pod that is about to be asked for."""
        record = PodRecord(
            name=name,
            gpu=gpu,
            cloud=cloud,
            usd_per_hour=usd_per_hour,
            state="wanted",
            wanted_at=self._clock.now(),
        )
        self._document.pods[name] = record
        await self._tell("pod.wanted", name, {"gpu": gpu, "cloud": cloud})

    async def made(self, name: str, *, pod_id: str, usd_per_hour: float) -> None:
        """It exists."""
        now = self._clock.now()
        self._document.num_made += 1
        self._change(name, state="made", pod_id=pod_id, usd_per_hour=usd_per_hour, made_at=now)
        await self._tell("pod.made", name, {"id": pod_id, "usd_per_hour": usd_per_hour})

    async def ready(self, name: str, life: str) -> None:
        """Its worker has spoken."""
        self._change(name, state="ready", life=life, ready_at=self._clock.now())
        await self._tell("pod.ready", name, {})

    async def ending(self, name: str, why: str) -> None:
        """It is to go; repeated calls keep the first reason."""
        record = self._document.pods.get(name)
        if record is None or record.state == "ending":
            return
        self._change(name, state="ending", why=why)
        await self._tell("pod.ending", name, {"why": why})

    async def gone(self, name: str) -> None:
        """It is proved not to exist; what it cost is added to the sums."""
        record = self._document.pods.pop(name, None)
        if record is None:
            return
        spent = record.spent_usd(self._clock.now())
        hours = (self._clock.now() - record.made_at) / 3600 if record.made_at else 0.0
        sums = self._document
        sums.spent_usd[record.gpu] = sums.spent_usd.get(record.gpu, 0.0) + spent
        sums.hours[record.gpu] = sums.hours.get(record.gpu, 0.0) + hours
        await self._tell("pod.gone", name, {"why": record.why, "usd": round(spent, 6)})

    def _change(self, name: str, **fields: Any) -> None:  # noqa: ANN401 (fields of the record)
        record = self._document.pods.get(name)
        if record is None:
            raise FleetError(f"no pod {name!r} on record; this is a defect of the pod keeper")
        self._document.pods[name] = msgspec.structs.replace(record, **fields)

    async def _tell(self, kind: str, name: str, data: dict[str, Any]) -> None:
        text = msgspec.json.encode(self._document).decode()
        await self._writer.run(self._save(text, kind, name, data))

    def _save(self, text: str, kind: str, name: str, data: dict[str, Any]) -> Callable[[], None]:
        def save() -> None:
            store = self._writer.store
            with store.joined():
                store.set_meta(_PODS, text)
                store.events.append(kind, name, data)

        return save
