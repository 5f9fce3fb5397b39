"""Watches the pods of a run and sees to it that none is left; the run's only one to do so.

A pod is off the record only when it is proved not to exist: missing from the list and from its own
address, and not just young.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from nestling.core.clock import Clock
from nestling.core.errors import FleetError
from nestling.fleet.pods.config import RunpodFleet
from nestling.fleet.pods.records import PodRecord, PodRecords
from nestling.fleet.providers.runpod_api import ApiPod, PodRequest, RunpodApi
from nestling.fleet.providers.runpod_errors import (
    AccessError,
    KeyRefusedError,
    RateLimitedError,
    RunpodError,
    UncertainError,
)
from nestling.fleet.providers.runpod_ladder import Ladder, Step
from nestling.fleet.providers.runpod_maker import PodMaker

__all__ = ["PodKeeper"]

_log = logging.getLogger(__name__)

_DEAD = ("EXITED", "ERROR", "TERMINATED")
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
        self._records = records
        self._config = config
        self._prefix = prefix
        self._clock = clock
        self._heard_s = heard_s
        self._lost = lost
        self._seen: set[str] = set()
        self._deleted: set[str] = set()
        self._missing: dict[str, int] = {}
        self._started_at = clock.now()
        self.maker = PodMaker(
            api=api,
            ladder=ladder,
            records=records,
            config=config,
            prefix=prefix,
            clock=clock,
            request=request,
            end=self.end,
        )

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
            try:
                await self.tick()
            except Exception:  # noqa: BLE001 (a defect of ours must not leave paid pods unwatched)
                _log.exception("a look at the pods failed; the next one comes")

    async def tick(self) -> list[str]:
        """One look at everything; returns the names of strays that were ended."""
        await self._deadlines()
        try:
            pods = await self._api.list_pods()
        except (KeyRefusedError, AccessError) as error:
            self.maker.failure = FleetError(
                f"the pods cannot be listed any more: {error}; renew the key"
            )
            _log.error("%s", self.maker.failure)
            return []
        except RunpodError as error:
            _log.warning("the pods could not be listed: %s", error)
            return []
        by_name = {pod.name: pod for pod in pods if pod.name.startswith(self._prefix)}
        for record in self._records.all():
            try:
                await self._reconcile(record, by_name.get(record.name))
            except RunpodError as error:  # of one pod; the others are watched on
                _log.warning("pod %s could not be looked at: %s", record.name, error)
        return await self._end_strays(by_name.values())

    async def close(self, limit_s: float) -> list[str]:
        """End every pod and wait `limit_s` for the proof; returns the names of those that may live on.

        One whose end the API has confirmed, but that its list still shows, is only told of.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                async with asyncio.TaskGroup() as group:
                    for record in self._records.all():
                        group.create_task(self.end(record.name, "the run closes"))
                await self.tick()
                while self._records.all():
                    await asyncio.sleep(min(_LOOK_S, self._config.tick_s))
                    await self.tick()
        left = [record.name for record in self._records.all()]
        confirmed = self._deleted.intersection(left)
        if confirmed:
            _log.warning(
                "pods %s were ended, says the API, but its list still shows them; look again with: "
                "nestling fleet ls",
                ", ".join(sorted(confirmed)),
            )
        return [name for name in left if name not in confirmed]

    async def _deadlines(self) -> None:
        """What needs no list: boots that take too long, silent workers, age, and the spend cap."""
        config, now, now_s = self._config, self._clock.now(), self._clock.monotonic()
        for record in self.maker.alive():
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
        ahead = self.maker.burn_usd_per_hour() * 2 * config.tick_s / 3600
        if self._records.spent_usd() + ahead > config.max_usd:
            for record in self.maker.alive():
                await self.end(record.name, f"fleet.max_usd = {config.max_usd:g} is nearly spent")

    async def _end_boot(self, record: PodRecord) -> None:
        why = f"no word of its worker within {self._config.boot_s:g} s"
        words = ""
        with suppress(RunpodError):
            words = await self._api.log_tail(record.pod_id, "system")
        if words:
            why += f"; its system log ends: {words[-300:]}"
        self.maker.failed(record.name, why)
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
        if self.maker.is_asking(record.name):
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
