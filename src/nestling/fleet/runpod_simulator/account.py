"""The state of a simulated Runpod account: pods, stock, credit, secrets and the clock they share."""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestling.fleet.runpod_simulator.pod import SimulatedPod
from nestling.fleet.runpod_simulator.script import Script

__all__ = ["Account", "ProblemError", "SimulatedTime"]

_EPOCH_S = 1_900_000_000.0
_TICK_S = 0.5
_STOCK_OUT = "There are no longer any instances available with the requested specifications."
_SECRET = re.compile(r"\{\{\s*RUNPOD_SECRET_(\w+)\s*\}\}")
_LEVELS = ((8, "HIGH"), (4, "MEDIUM"), (1, "LOW"))


class ProblemError(Exception):
    """An answer that is no success: status, and what RFC 9457 calls detail and errors."""

    def __init__(self, status: int, detail: str, errors: list[str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.errors = errors


class SimulatedTime:
    """The event loop's time, faster if wished, and moved by hand."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time()
        self._moved_s = 0.0

    def now(self) -> float:
        """Simulated seconds since the epoch."""
        return _EPOCH_S + self.elapsed()

    def elapsed(self) -> float:
        """Simulated seconds since the start."""
        return (self._loop.time() - self._start_s) * self.speed + self._moved_s

    def advance(self, seconds: float) -> None:
        """Move it forward."""
        self._moved_s += seconds

    async def sleep(self, seconds: float) -> None:
        """Until so much simulated time has passed, if nobody moves it."""
        await asyncio.sleep(seconds / self.speed)


class Account:
    """One user's pods and money."""

    def __init__(self, script: Script, time: SimulatedTime, folder: Path, key: str) -> None:
        self.script = script
        self.time = time
        self.key = key
        self.pods: dict[str, SimulatedPod] = {}
        self.machines = script.machines()
        self.secrets: dict[str, tuple[str, str]] = {}
        """Id to name and value."""
        self.ssh_keys: list[str] = []
        self.kept: dict[str, dict[str, dict[str, Any]]] = {"templates": {}, "network-volumes": {}}
        self.credit_usd = script.credit_usd
        self.charges: dict[tuple[str, int], float] = {}
        self.num_refused = 0
        self._folder = folder
        self._stock = {index: stock.count for index, stock in enumerate(self.machines)}
        self._history: deque[tuple[float, dict[int, int]]] = deque()
        self._rng = random.Random(script.seed)
        self._charged_at = time.now()
        self._remember()

    # --- time --------------------------------------------------------------------------------

    async def live(self) -> None:
        """Let things happen when they are due."""
        while True:
            self.settle()
            await self.time.sleep(_TICK_S)

    def settle(self) -> None:
        """Bring everything up to the present."""
        now = self.time.now()
        for pod in self.pods.values():
            pod.settle(now)
        self._charge(now)

    def close(self) -> None:
        """Kill every worker."""
        for pod in self.pods.values():
            pod.end_process()

    # --- pods --------------------------------------------------------------------------------

    def create(self, body: dict[str, Any]) -> SimulatedPod:
        """Make a pod; `ProblemError` 400 when nothing fits and 402 without an hour of credit."""
        now = self.time.now()
        index = self._fitting(body)
        if index is None:
            self.num_refused += 1
            raise ProblemError(400, _STOCK_OUT)
        stock = self.machines[index]
        usd_per_hour = stock.usd_per_hour * int(body["gpu"].get("count", 1))
        if self.credit_usd < self.burn(now) + usd_per_hour:
            raise ProblemError(402, "Your balance is too low for one hour of this pod.")
        number = len(self.pods) + 1
        faults = tuple(fault for fault in self.script.pod if number in fault.pods)
        spread = self._rng.uniform(-1, 1) * self.script.boot_spread
        slow_s = sum(fault.seconds for fault in faults if fault.do == "slow")
        pod = SimulatedPod(
            id=f"sim{number:04d}{self._rng.randrange(16**6):06x}",
            number=number,
            body=body,
            stock=stock,
            created_at=now,
            boot_s=self.script.boot_s * (1 + spread) + slow_s,
            faults=faults,
            folder=self._folder / f"pod-{number:04d}",
            key=f"pod-{secrets.token_hex(16)}",
            environment=self._filled(body.get("env", {})),
            rng=random.Random(f"{self.script.seed}/{number}"),
        )
        pod.log.append((now, "system", f"create container of {body.get('image')}"))
        self._take(index, pod.count)
        self.pods[pod.id] = pod
        return pod

    async def delete(self, pod: SimulatedPod) -> None:
        """End a pod for good."""
        if pod.deleted_at is not None:
            raise ProblemError(404, "Pod not found.")
        if pod.fault("lock") or pod.body.get("locked"):
            raise ProblemError(409, "The pod is locked.")
        if pod.body.get("cluster"):
            raise ProblemError(409, "The pod belongs to a cluster.")
        self._charge(self.time.now())
        if pod.deleted_at is None:  # not ended by that for want of credit
            self._give_up(pod)
        await asyncio.to_thread(pod.end_process)

    async def act(self, pod: SimulatedPod, action: str) -> None:
        """Start, stop, restart or terminate; `ProblemError` 409 when that is not possible now."""
        now = self.time.now()
        if action not in pod.actions(now):
            raise ProblemError(
                409, f"Cannot {action} a pod that is {pod.status(now)}.", list(pod.actions(now))
            )
        if action == "terminate":
            await self.delete(pod)
            return
        if pod.fault("lock") or pod.body.get("locked"):
            raise ProblemError(409, "The pod is locked.")
        await asyncio.to_thread(pod.end_process)
        if action == "stop":
            pod.forced = "EXITED"
            self._return(pod)
        else:
            if not pod.has_machine:
                index = self._fitting(pod.body)
                if index is None:
                    raise ProblemError(400, _STOCK_OUT)
                self._take(index, pod.count)
                pod.has_machine = True
            pod.stale_ports = dict(pod.ports)
            pod.forced = None
            pod.worker_at = now
            pod.start(now)

    def by_key(self, key: str) -> SimulatedPod | None:
        """The pod whose own key this is."""
        return next((pod for pod in self.pods.values() if pod.key == key), None)

    def live_pods(self) -> list[SimulatedPod]:
        """Those that exist, whatever their state."""
        return [pod for pod in self.pods.values() if pod.deleted_at is None and not pod.vanished]

    # --- catalog and money -------------------------------------------------------------------

    def catalog(self, cloud: str | None) -> list[dict[str, Any]]:
        """GPU types with prices, and stock as it was a while ago."""
        seen = self._seen_stock()
        found: dict[str, dict[str, Any]] = {}
        for index, stock in enumerate(self.machines):
            entry = found.setdefault(
                stock.gpu,
                {
                    "id": stock.gpu,
                    "name": stock.gpu,
                    "pool": "SIM",
                    "manufacturer": "NVIDIA",
                    "memory": stock.memory_gb,
                    "secure": False,
                    "community": False,
                    "price": {},
                    "maxCount": {"secure": 8, "community": 8},
                    "availability": "NONE",
                    "dataCenters": [],
                },
            )
            entry[stock.cloud.lower()] = True
            entry["price"][stock.cloud.lower()] = stock.usd_per_hour
            if cloud is not None and stock.cloud != cloud:
                continue
            level = stock.shown or _level(seen[index])
            entry["availability"] = max(entry["availability"], level, key=_rank)
            if level != "NONE":
                place = {"id": stock.data_center, "name": stock.data_center, "availability": level}
                entry["dataCenters"].append(place)
        return list(found.values())

    def burn(self, now: float) -> float:
        """USD per hour of everything that is billed."""
        return sum(pod.usd_per_hour for pod in self.pods.values() if pod.is_billed(now))

    def spent_usd(self) -> float:
        """By all pods so far."""
        return sum(pod.billed_usd for pod in self.pods.values())

    def _charge(self, now: float) -> None:
        passed_s, self._charged_at = now - self._charged_at, now
        for pod in self.pods.values():
            if pod.is_billed(now):
                since_s = min(passed_s, now - pod.created_at)
                usd = max(0.0, since_s) / 3600 * pod.usd_per_hour
                pod.billed_usd += usd
                self.credit_usd -= usd
                hour = int(now // 3600)
                self.charges[pod.id, hour] = self.charges.get((pod.id, hour), 0.0) + usd
        if self.credit_usd <= 0:
            for pod in self.live_pods():
                if (pod.body.get("mounts") or {}).get("network"):
                    pod.forced = "EXITED"
                else:
                    self._give_up(pod)
                pod.end_process()

    def _give_up(self, pod: SimulatedPod) -> None:
        pod.deleted_at = self.time.now()
        self._return(pod)

    def _fitting(self, body: Mapping[str, Any]) -> int | None:
        gpu = body["gpu"]
        places = body.get("dataCenterIds") or []
        for index, stock in enumerate(self.machines):
            if (
                stock.gpu == gpu["id"]
                and stock.cloud == body.get("cloud", "SECURE")
                and self._stock[index] >= int(gpu.get("count", 1))
                and (not places or stock.data_center in places)
            ):
                return index
        return None

    def _take(self, index: int, count: int) -> None:
        self._stock[index] -= count
        self._remember()

    def _return(self, pod: SimulatedPod) -> None:
        if not pod.has_machine:
            return
        pod.has_machine = False
        for index, stock in enumerate(self.machines):
            if stock is pod.stock:
                self._stock[index] += pod.count
        self._remember()

    def _remember(self) -> None:
        self._history.append((self.time.now(), dict(self._stock)))

    def _seen_stock(self) -> dict[int, int]:
        """As the catalog knows it: late."""
        until = self.time.now() - self.script.catalog_lag_s
        while len(self._history) > 1 and self._history[1][0] <= until:
            self._history.popleft()
        return self._history[0][1]

    def _filled(self, env: Mapping[str, str]) -> dict[str, str]:
        values = dict(self.secrets.values())
        return {
            name: _SECRET.sub(lambda found: values.get(found[1], ""), value)
            for name, value in env.items()
        }


def _level(count: int) -> str:
    return next((level for least, level in _LEVELS if count >= least), "NONE")


def _rank(level: str) -> int:
    return ("NONE", "LOW", "MEDIUM", "HIGH").index(level)
