"""Which kind of machine to ask for next: preference, price, stock as a hint, and cool-down.

A refusal says nothing about its cause (no stock and an impossible request look alike), so it cools
its rung down and the next one is tried. Stock from the catalog only skips rungs with none; what it
calls plentiful may be refused all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nestling.core.clock import Clock
from nestling.fleet.pods.config import Rung
from nestling.fleet.providers.runpod_api import Gpu

__all__ = ["Ladder", "Step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A rung with what the API calls it and what a pod costs at most."""

    index: int
    rung: Rung
    gpu_id: str

    @property
    def usd_per_hour(self) -> float:
        """The most a pod of this rung may cost."""
        return self.rung.max_usd_per_hour

    def describe(self) -> str:
        """The rung with everything that narrows it, for an error message."""
        rung = self.rung
        where = f" in {', '.join(rung.data_centers)}" if rung.data_centers else ""
        cuda = f", CUDA >= {rung.min_cuda_version}" if rung.min_cuda_version else ""
        return f"{rung.count} x {self.gpu_id} ({rung.cloud}{where}{cuda})"


class Ladder:
    """Rungs in order of preference, and how each did."""

    def __init__(self, rungs: Sequence[Rung], gpu_ids: Mapping[str, str], clock: Clock) -> None:
        self._steps = [
            Step(index=index, rung=rung, gpu_id=gpu_ids[rung.gpu])
            for index, rung in enumerate(rungs)
        ]
        self._clock = clock
        self._cool_until_s = [0.0] * len(rungs)
        self._closed: set[int] = set()
        self._dear: set[int] = set()
        self._empty: set[int] = set()
        self.refusals: dict[int, str] = {}
        """The last answer of each rung that was refused since a pod was made."""

    def candidates(self) -> list[Step]:
        """Rungs worth a request now, best first."""
        now_s = self._clock.monotonic()
        left_out = self._closed | self._dear | self._empty
        return [
            step
            for step in self._steps
            if step.index not in left_out and self._cool_until_s[step.index] <= now_s
        ]

    def next_in_s(self) -> float | None:
        """Seconds until some rung is worth a request; None when all are closed to this account."""
        now_s = self._clock.monotonic()
        ends = [
            self._cool_until_s[step.index] - now_s
            for step in self._steps
            if step.index not in self._closed
        ]
        return max(0.0, min(ends)) if ends else None

    def cool(self, step: Step, seconds: float, why: str) -> None:
        """It was refused or its pod failed; leave it alone for a while."""
        self._cool_until_s[step.index] = self._clock.monotonic() + seconds
        self.refusals[step.index] = f"{step.describe()}: {why}"

    def close(self, step: Step, why: str) -> None:
        """This account may not have it at all."""
        self._closed.add(step.index)
        self.refusals[step.index] = f"{step.describe()}: {why}"

    def worked(self) -> None:
        """A pod was made: earlier refusals were stock, not a defect of the request."""
        self.refusals.clear()

    def all_refused(self) -> bool:
        """Whether every rung was refused since a pod was made last."""
        return len(self.refusals) == len(self._steps)

    def note_catalog(self, cloud: str, gpus: Iterable[Gpu]) -> None:
        """Take in prices and stock of one cloud."""
        known = {gpu.id: gpu for gpu in gpus}
        for step in self._steps:
            gpu = known.get(step.gpu_id)
            if step.rung.cloud != cloud or gpu is None:
                continue
            usd = gpu.usd_per_hour(cloud)
            is_dear = usd is not None and usd * step.rung.count > step.usd_per_hour + 1e-9
            (self._dear.add if is_dear else self._dear.discard)(step.index)
            (self._empty.add if gpu.availability == "NONE" else self._empty.discard)(step.index)

    @property
    def clouds(self) -> set[str]:
        """Clouds that the ladder names."""
        return {step.rung.cloud for step in self._steps}
