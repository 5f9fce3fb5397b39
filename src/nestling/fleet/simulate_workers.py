"""Workers that only pass virtual time: they beat, finish, are slow, fall silent and die.

What happens to a try follows from seed, job and try alone, so that the order in which workers meet
jobs changes nothing. Deaths come at a constant rate while a worker works, so how long it has lived
does not matter (exponential lifetimes have no memory) and a draw per try is exact.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from nestling.core.errors import FleetError
from nestling.core.seeds import stream
from nestling.fleet.messages import Beat, Done, FromWorker, Ready, ToWorker, Work

__all__ = ["Fate", "Hazards", "SimulatedNode", "SimulatedProvider"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazards:
    """What goes wrong with workers, and how they behave otherwise."""

    deaths_per_minute: float = 0.0
    """Share of the busy workers that die in a minute."""
    silent_share: float = 0.1
    """Of the deaths: the worker stays, but nothing is heard from it any more."""
    straggler_share: float = 0.0
    """Of the tries: `straggler_factor` times as long."""
    straggler_factor: float = 4.0
    restart_s: float = 20.0
    """From launch to ready, after a death; the first launch is over before the jobs come."""
    beat_s: float = 15.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What comes of one try."""

    length_s: float
    dies_after_s: float | None
    is_silent: bool


class SimulatedNode:
    """One life of one worker."""

    def __init__(self, name: str, provider: SimulatedProvider, ready_after_s: float) -> None:
        self.name = name
        self._provider = provider
        self._loop = asyncio.get_running_loop()
        self._messages: deque[FromWorker] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._is_dead = False
        self._later(ready_after_s, Ready(pid=1))

    async def send(self, message: ToWorker) -> None:
        """Hand a message over; `FleetError` when the worker is gone."""
        if self._is_dead:
            raise FleetError(f"worker {self.name} is gone")
        if isinstance(message, Work):
            self._begin(message)

    async def receive(self) -> FromWorker:
        """The next message; `FleetError` when the worker is gone. Cancelling loses nothing."""
        while not self._messages:
            if self._is_dead:
                raise FleetError(f"worker {self.name} is gone")
            self._waiting = self._loop.create_future()
            await self._waiting
        return self._messages.popleft()

    async def last_words(self) -> str:
        """Simulated workers have none."""
        return ""

    def end(self) -> None:
        """Dead from now on; says nothing more."""
        self._is_dead = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._wake()

    def _begin(self, work: Work) -> None:
        fate = self._provider.fate(work)
        self._timers.clear()
        if fate.dies_after_s is None:
            self._later(fate.length_s, Done(token=work.token, result={"n": work.payload["n"]}))
        elif not fate.is_silent:
            self._timers.append(self._loop.call_later(fate.dies_after_s, self.end))
        last_beat_s = fate.length_s if fate.dies_after_s is None else fate.dies_after_s
        self._beat_until(self._loop.time() + last_beat_s, Beat(token=work.token))

    def _beat_until(self, end_s: float, beat: Beat) -> None:
        beat_s = self._provider.hazards.beat_s

        def next_beat() -> None:
            self._say(beat)
            if self._loop.time() + beat_s < end_s:
                self._timers[-1] = self._loop.call_later(beat_s, next_beat)

        if self._loop.time() + beat_s < end_s:
            self._timers.append(self._loop.call_later(beat_s, next_beat))

    def _later(self, seconds: float, message: FromWorker) -> None:
        self._timers.append(self._loop.call_later(seconds, self._say, message))

    def _say(self, message: FromWorker) -> None:
        self._messages.append(message)
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class SimulatedProvider:
    """Any number of workers of one machine type."""

    machine = "cpu-core"
    lane = "cpu"

    def __init__(self, hazards: Hazards, num_jobs: int) -> None:
        self.hazards = hazards
        self.num_deaths = 0
        """Tries that ended with the death or silence of their worker."""
        self.finished_s = array("d", bytes(8 * num_jobs))
        """By job: length of the try that was finished."""
        self._tries_ended: dict[str, int] = {}
        self._nodes: dict[str, SimulatedNode] = {}
        self._launched: set[str] = set()

    async def launch(self, name: str) -> SimulatedNode:
        """Start a worker, or return the running one of that name."""
        if name not in self._nodes:
            after_s = self.hazards.restart_s if name in self._launched else 0.0
            self._launched.add(name)
            self._nodes[name] = SimulatedNode(name, self, after_s)
        return self._nodes[name]

    async def list(self) -> Sequence[str]:
        """Names of workers that run."""
        return sorted(self._nodes)

    async def terminate(self, name: str) -> None:
        """End a worker; fine when it is gone already."""
        node = self._nodes.pop(name, None)
        if node is not None:
            node.end()

    async def sweep(self) -> Sequence[str]:
        """Nothing is ever left behind."""
        return []

    async def close(self) -> None:
        """End every worker."""
        for name in tuple(self._nodes):
            await self.terminate(name)

    def fate(self, work: Work) -> Fate:
        """What comes of the next try of a job."""
        hazards = self.hazards
        number = self._tries_ended.get(work.job_id, 0)
        rng = stream(hazards.seed, work.job_id, number)
        length_s = float(work.payload["seconds"])
        if rng.random() < hazards.straggler_share:
            length_s *= hazards.straggler_factor
        dies_after_s = None
        if hazards.deaths_per_minute > 0:
            # A share p of all workers dies in a minute: the hazard is -ln(1 - p) per minute.
            rate_per_s = -math.log1p(-hazards.deaths_per_minute) / 60
            lives_s = rng.expovariate(rate_per_s)
            dies_after_s = lives_s if lives_s < length_s else None
        if dies_after_s is None:
            self.finished_s[work.payload["n"]] = length_s
        else:
            self.num_deaths += 1
            self._tries_ended[work.job_id] = number + 1
        is_silent = rng.random() < hazards.silent_share
        return Fate(length_s=length_s, dies_after_s=dies_after_s, is_silent=is_silent)
