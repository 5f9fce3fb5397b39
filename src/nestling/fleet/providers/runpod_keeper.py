"""Makes pods, watches them, and sees to it that none is left: the one writer of a run's pods.

A pod is on record before it is asked for, under a name of its own, so whatever is lost on the way (a
reply, this process) can be looked up in the account's list. A pod is off the record only when it is
proved not to exist: missing from the list and from its own address, and not just young.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress

from nestling.core.clock import Clock
from nestling.core.errors import FleetError
from nestling.fleet.pod_config import RunpodFleet
from nestling.fleet.pod_records import PodRecord, PodRecords
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

__all__ = ["PodKeeper"]

_log = logging.getLogger(__name__)

_FIND_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
_CREDIT_PAUSE_S = 120.0
_DEAD = ("EXITED", "ERROR", "TERMINATED")
_AT_ONCE = 4
_LOOK_S = 1.0


class PodKeeper:
    """`request` makes the API request of a pod; `lost` is told when a pod will do no more work."""

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
        heard_s: Callable[[str], float | None],
        lost: Callable[[str, str], None],
    ) -> None:
        self._api = api
        self._ladder = ladder
        self._records = records
        self._config = config
        self._prefix = prefix
        self._clock = clock
        self._request = request
        self._heard_s = heard_s
        self._lost = lost
        self._choosing = asyncio.Lock()
        """Protects the caps: one rung is chosen and put on record at a time."""
        self._creating = asyncio.Semaphore(_AT_ONCE)
        self._asking: set[str] = set()
        self._steps: dict[str, Step] = {}
        self._seen: set[str] = set()
        self._deleted: set[str] = set()
        self._missing: dict[str, int] = {}
        self._started_at = clock.now()
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

    async def end(self, name: str, why: str) -> None:
        """Terminate a pod; the ticks go on until it is proved gone. May be repeated."""
        record = self._records.get(name)
        if record is None:
            return
        _log.info("pod %s ends: %s", name, why)
        await self._records.ending(name, why)
        self._lost(name, why)
        if record.pod_id:
            with suppress(UncertainError, RateLimitedError):
                await self._delete(name, record.pod_id)

    async def run(self) -> None:
        """Tick for ever; slower when the account's rate limits are nearly used up."""
        while True:
            await asyncio.sleep(self._api.http.limits.pace_s(self._config.tick_s))
            await self.tick()

    async def tick(self) -> list[str]:
        """One look at everything; returns the names of strays that were ended."""
        await self._deadlines()
        try:
            pods = await self._api.list_pods()
        except (KeyRefusedError, AccessError) as error:
            self.failure = FleetError(f"the pods cannot be listed any more: {error}; renew the key")
            _log.error("%s", self.failure)
            return []
        except RunpodError as error:
            _log.warning("the pods could not be listed: %s", error)
            return []
        by_name = {pod.name: pod for pod in pods if pod.name.startswith(self._prefix)}
        for record in self._records.all():
            with suppress(UncertainError, RateLimitedError):
                await self._reconcile(record, by_name.get(record.name))
        return await self._end_strays(by_name.values())

    async def close(self, limit_s: float) -> list[str]:
        """End every pod and wait for the proof; returns the names of those that may live on.

        One whose end the API has confirmed, but that its list still shows, is only told of.
        """
        async with asyncio.TaskGroup() as group:
            for record in self._records.all():
                group.create_task(self.end(record.name, "the run closes"))
        end_s = self._clock.monotonic() + limit_s
        while True:
            await self.tick()
            left = [record.name for record in self._records.all()]
            if not left or self._clock.monotonic() >= end_s:
                break
            await asyncio.sleep(min(_LOOK_S, self._config.tick_s))
        confirmed = self._deleted.intersection(left)
        if confirmed:
            _log.warning(
                "pods %s were ended, says the API, but its list still shows them; look again with: "
                "nestling fleet ls",
                ", ".join(sorted(confirmed)),
            )
        return [name for name in left if name not in confirmed]

    def burn_usd_per_hour(self) -> float:
        """Of all pods that exist or may exist."""
        return sum(record.usd_per_hour for record in self._records.all())

    # --- making ------------------------------------------------------------------------------

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
            await self.end(
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
            if not self._alive():
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
        if self._alive():
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

    def _alive(self) -> list[PodRecord]:
        return [one for one in self._records.all() if one.state in ("made", "ready")]

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

    # --- watching ----------------------------------------------------------------------------

    async def _deadlines(self) -> None:
        """What needs no list: boots that take too long, silent workers, age, and the spend cap."""
        config, now, now_s = self._config, self._clock.now(), self._clock.monotonic()
        for record in self._alive():
            heard_s = self._heard_s(record.name)
            if record.state == "made" and now - record.made_at > config.boot_s:
                await self._end_boot(record)
            elif record.state == "ready" and heard_s is not None:
                if now_s - heard_s > config.heartbeat_s:
                    await self.end(
                        record.name, f"its worker was silent for {now_s - heard_s:.0f} s"
                    )
                elif now - record.made_at > config.max_age_s:
                    await self.end(record.name, f"older than {config.max_age_s:g} s")
            elif record.state == "ready" and now - self._started_at > config.boot_s:
                await self.end(record.name, "its worker did not come to this controller")
        if config.max_usd is None:
            return
        ahead = self.burn_usd_per_hour() * 2 * config.tick_s / 3600
        if self._records.spent_usd() + ahead > config.max_usd:
            for record in self._alive():
                await self.end(record.name, f"fleet.max_usd = {config.max_usd:g} is nearly spent")

    async def _end_boot(self, record: PodRecord) -> None:
        why = f"no word of its worker within {self._config.boot_s:g} s"
        words = ""
        with suppress(RunpodError):
            words = await self._api.log_tail(record.pod_id, "system")
        if words:
            why += f"; its system log ends: {words[-300:]}"
        step = self._steps.get(record.name)
        if step is not None:
            self._ladder.cool(step, self._config.cool_s, why)
        await self.end(record.name, why)

    async def _reconcile(self, record: PodRecord, pod: ApiPod | None) -> None:
        name = record.name
        if pod is not None:
            self._seen.add(name)
            self._missing.pop(name, None)
        if record.state == "wanted":
            await self._settle_doubt(record, pod)
        elif record.state == "ending":
            await self._prove_gone(record, pod)
        elif pod is None:
            await self._count_missing(record)
        elif pod.status in _DEAD:
            await self.end(name, f"its status is {pod.status}")

    async def _settle_doubt(self, record: PodRecord, pod: ApiPod | None) -> None:
        """A pod that was asked for without an answer: use it when it exists after all."""
        if record.name in self._asking:
            return
        if pod is not None:
            await self._records.made(
                record.name, pod_id=pod.id, usd_per_hour=pod.cost or record.usd_per_hour
            )
        elif self._clock.now() - record.wanted_at > self._config.grace_s:
            await self._records.gone(record.name)

    async def _count_missing(self, record: PodRecord) -> None:
        """Listed before and missing twice, or never listed long after it was made: lost."""
        self._missing[record.name] = self._missing.get(record.name, 0) + 1
        is_young = self._clock.now() - record.made_at <= self._config.grace_s
        if self._missing[record.name] >= 2 and (record.name in self._seen or not is_young):
            await self.end(record.name, "it vanished from the account")

    async def _prove_gone(self, record: PodRecord, pod: ApiPod | None) -> None:
        name = record.name
        pod_id = pod.id if pod is not None else record.pod_id
        if pod is not None:
            await self._delete(name, pod_id)
            return
        if pod_id and await self._api.get_pod(pod_id) is not None:
            await self._delete(name, pod_id)
            return
        since = self._clock.now() - max(record.made_at, record.wanted_at)
        if name in self._deleted or name in self._seen or since > self._config.grace_s:
            await self._records.gone(name)
            for known in (self._deleted, self._seen):
                known.discard(name)
            self._missing.pop(name, None)

    async def _end_strays(self, pods: Iterable[ApiPod]) -> list[str]:
        """Pods with this run's prefix that are not on record: nobody else will end them."""
        ended = []
        for pod in pods:
            if self._records.get(pod.name) is None and pod.name not in self._deleted:
                _log.warning("pod %s belongs to this run but is not on record; it ends", pod.name)
                with suppress(RunpodError):
                    await self._delete(pod.name, pod.id)
                    ended.append(pod.name)
        return ended

    async def _delete(self, name: str, pod_id: str) -> None:
        try:
            if await self._api.delete_pod(pod_id):
                self._deleted.add(name)
        except (UncertainError, RateLimitedError):
            raise
        except RunpodError as error:
            _log.error("pod %s could not be ended: %s; trying again", name, error)
