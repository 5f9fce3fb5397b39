"""Asks for pods: a rung of the ladder within the caps, a record, the request, and all its answers.

A pod is on record before it is asked for, under a name of its own, so whatever is lost on the way (a
reply, this process) can be looked up in the account's list.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress

from nestling.core.clock import Clock
from nestling.core.errors import FleetError
from nestling.fleet.pods.config import RunpodFleet
from nestling.fleet.pods.records import PodRecord, PodRecords
from nestling.fleet.providers.runpod_api import ApiPod, PodRequest, RunpodApi
from nestling.fleet.providers.runpod_errors import (
    AccessError,
    DefectError,
    KeyRefusedError,
    NoCreditError,
    RateLimitedError,
    RefusedError,
    RunpodError,
    UncertainError,
)
from nestling.fleet.providers.runpod_ladder import Ladder, Step

__all__ = ["PodMaker"]

_log = logging.getLogger(__name__)

_FIND_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
_CREDIT_PAUSE_S = 120.0
_AT_ONCE = 4
_LOOK_S = 1.0


class PodMaker:
    """`request` makes the API request of a pod; `end` terminates one that cost more than was asked."""

    def __init__(
        self,
        *,
        api: RunpodApi,
        ladder: Ladder,
        records: PodRecords,
        config: RunpodFleet,
        prefix: str,
        clock: Clock,
        request: Callable[[str, Step], PodRequest],
        end: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._api = api
        self._ladder = ladder
        self._records = records
        self._config = config
        self._prefix = prefix
        self._clock = clock
        self._request = request
        self._end = end
        self._choosing = asyncio.Lock()
        """Protects the caps: one rung is chosen and put on record at a time."""
        self._creating = asyncio.Semaphore(_AT_ONCE)
        self._asking: set[str] = set()
        self._steps: dict[str, Step] = {}
        self._catalog_s: float | None = None
        self._pause_until_s = 0.0
        self._told_refused = False
        self.failure: FleetError | None = None
        """What makes more pods pointless; raised by `obtain`."""

    async def obtain(self, bound: set[str]) -> PodRecord:
        """A pod that was just made; waits while the ladder, the caps or the credit allow none.

        Its name is in `bound` before it exists, so that nobody else takes it for a spare.

        Raises `FleetError` when none can be had: wrong key or request, spent money, or nothing at
        all for `patience_s`.
        """
        began_s = self._clock.monotonic()
        while True:
            self._require_sense(began_s)
            chosen = await self._choose()
            if chosen is None:
                await asyncio.sleep(self._wait_s())
                continue
            name, step = chosen
            bound.add(name)
            record = None
            try:
                async with self._creating:
                    record = await self._make(name, step)
            finally:
                self._asking.discard(name)
                if record is None:
                    bound.discard(name)
            if record is not None:
                return record

    def is_asking(self, name: str) -> bool:
        """Whether a request for it is on its way, so that its record needs no second look."""
        return name in self._asking

    def failed(self, name: str, why: str) -> None:
        """Its pod never worked: leave the rung alone for a while."""
        step = self._steps.get(name)
        if step is not None:
            self._ladder.cool(step, self._config.cool_s, why)

    def burn_usd_per_hour(self) -> float:
        """Of all pods that exist or may exist."""
        return sum(record.usd_per_hour for record in self._records.all())

    def alive(self) -> list[PodRecord]:
        """Pods that exist and are not to go."""
        return [one for one in self._records.all() if one.state in ("made", "ready")]

    async def _choose(self) -> tuple[str, Step] | None:
        """A rung within the caps, put on record under a new name; None when there is none now."""
        async with self._choosing:
            if self._clock.monotonic() < self._pause_until_s:
                return None
            await self._read_catalog()
            if len(self._records.all()) >= self._config.workers + _AT_ONCE:
                return None  # too many are still on their way out
            burn = self.burn_usd_per_hour()
            for step in self._ladder.candidates():
                if burn + step.usd_per_hour > self._config.max_usd_per_hour + 1e-9:
                    continue
                if self._would_overspend(burn + step.usd_per_hour):
                    continue
                name = f"{self._prefix}{secrets.token_hex(6)}"
                self._asking.add(name)
                self._steps[name] = step
                await self._records.want(
                    name,
                    gpu=step.rung.gpu,
                    cloud=step.rung.cloud,
                    usd_per_hour=step.usd_per_hour,
                )
                return name, step
            return None

    async def _make(self, name: str, step: Step) -> PodRecord | None:
        """Ask for it; None when another try is due."""
        config = self._config
        try:
            pod = await self._api.create_pod(self._request(name, step), limit_s=config.create_s)
        except UncertainError as error:
            _log.warning("%s; looking whether pod %s exists", error, name)
            pod_or_none = await self._find(name)
            if pod_or_none is None:
                self._ladder.cool(step, config.cool_s / 2, str(error))
                return None
            pod = pod_or_none
        except RunpodError as error:
            await self._records.gone(name)
            self._refused(step, error)
            return None
        finally:
            self._asking.discard(name)
        return await self._made(name, step, pod)

    async def _made(self, name: str, step: Step, pod: ApiPod) -> PodRecord | None:
        cost = pod.cost or step.usd_per_hour
        await self._records.made(name, pod_id=pod.id, usd_per_hour=cost)
        if cost > step.usd_per_hour + 1e-9:
            self._ladder.cool(step, self._config.cool_s, f"it costs {cost:g} USD/h")
            await self._end(
                name, f"it costs {cost:g} USD/h; at most {step.usd_per_hour:g} was asked"
            )
            return None
        self._ladder.worked()
        self._told_refused = False
        record = self._records.get(name)
        assert record is not None
        return record

    async def _find(self, name: str) -> ApiPod | None:
        """Whether a pod whose making is in doubt exists; none found is not yet a proof."""
        for pause_s in _FIND_PAUSES_S:
            await asyncio.sleep(pause_s)
            with suppress(UncertainError, RateLimitedError):
                for pod in await self._api.list_pods():
                    if pod.name == name:
                        return pod
        return None

    def _refused(self, step: Step, error: RunpodError) -> None:
        """Take the consequence of an answer that made nothing."""
        if isinstance(error, RefusedError):
            self._ladder.cool(step, self._config.cool_s, error.detail or str(error))
        elif isinstance(error, AccessError):
            self._ladder.close(step, f"not open to this account: {error.detail}")
        elif isinstance(error, NoCreditError):
            self._pause_until_s = self._clock.monotonic() + _CREDIT_PAUSE_S
            _log.error("no credit for another pod: %s; add credit, the others go on", error.detail)
            if not self.alive():
                self.failure = FleetError(
                    f"no credit for any pod: {error.detail}; add credit, then continue the run"
                )
        elif isinstance(error, RateLimitedError):
            self._pause_until_s = self._clock.monotonic() + (error.retry_after_s or 10.0)
        elif isinstance(error, KeyRefusedError | DefectError):
            self.failure = FleetError(f"the request for a pod is refused for good: {error}")
        if self._ladder.all_refused() and not self._told_refused:
            self._told_refused = True
            _log.error("%s", self._all_refused_text())

    def _all_refused_text(self) -> str:
        tried = "; ".join(self._ladder.refusals[index] for index in sorted(self._ladder.refusals))
        return (
            f"every rung of the ladder was refused, which stock alone seldom does: {tried}. Widen, in "
            f"this order, data_centers, disk_gb (now {self._config.disk_gb}) and min_cuda_version, "
            "or add rungs"
        )

    def _require_sense(self, began_s: float) -> None:
        if self.failure is not None:
            raise self.failure
        if self._ladder.next_in_s() is None:
            raise FleetError(self._all_refused_text())
        if self.alive():
            return
        if self._would_overspend(min(rung.max_usd_per_hour for rung in self._config.ladder)):
            raise FleetError(
                f"the pods of this run have cost {self._records.spent_usd():.4f} USD; expected at "
                f"most fleet.max_usd = {self._config.max_usd:g}; raise it to go on"
            )
        if self._clock.monotonic() - began_s > self._config.patience_s:
            raise FleetError(
                f"no pod for {self._config.patience_s:g} s. {self._all_refused_text()}"
            )

    def _would_overspend(self, usd_per_hour: float) -> bool:
        """Whether pods at this rate could pass the cap before they can be ended."""
        if self._config.max_usd is None:
            return False
        ahead_s = self._config.idle_s + 2 * self._config.tick_s
        return self._records.spent_usd() + usd_per_hour * ahead_s / 3600 > self._config.max_usd

    def _wait_s(self) -> float:
        return max(_LOOK_S, min(self._ladder.next_in_s() or 0.0, self._config.tick_s))

    async def _read_catalog(self) -> None:
        """Prices and stock, as old as a cool-down at most; without an answer the ladder goes on."""
        now_s = self._clock.monotonic()
        if self._catalog_s is not None and now_s - self._catalog_s < max(self._config.cool_s, 30.0):
            return
        self._catalog_s = now_s
        for cloud in sorted(self._ladder.clouds):
            try:
                self._ladder.note_catalog(cloud, await self._api.gpus(cloud))
            except KeyRefusedError as error:
                self.failure = FleetError(f"{error}; check RUNPOD_API_KEY")
            except RunpodError as error:
                _log.warning("no catalog: %s", error)
