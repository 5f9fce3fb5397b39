"""Workers on Runpod pods: made when jobs wait, reused while healthy, ended when idle.

A worker of the pool is bound to a pod for one life of its worker process. When that process dies or
must be killed but the pod still answers, the process is replaced and the pod stays: a boot takes
minutes and is paid for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from nestling.core.clock import Clock
from nestling.core.errors import FleetError
from nestling.core.rundir import ArtifactStore
from nestling.fleet.pods.channel import PodChannel, TooEarlyError
from nestling.fleet.pods.config import RunpodFleet
from nestling.fleet.pods.link import PodLink
from nestling.fleet.pods.records import PodRecord, PodRecords
from nestling.fleet.providers.runpod_api import RunpodApi
from nestling.fleet.providers.runpod_errors import AccessError, RunpodError
from nestling.fleet.providers.runpod_keeper import PodKeeper
from nestling.fleet.providers.runpod_ladder import Ladder
from nestling.fleet.providers.runpod_node import PodNode
from nestling.fleet.providers.runpod_request import PodRun, pod_request

__all__ = ["RunpodProvider"]

_log = logging.getLogger(__name__)

_CLOSE_S = 25.0
"""With the next one, less than `finish` gives a release."""
_FORGET_S = 3.0
"""For the boot secret once no pod needs it."""
_MAX_RESTARTS = 2
"""Of a pod's worker process without a job done; then the machine is to blame."""


class RunpodProvider:
    """Starts workers on pods. `start` (or the first `sweep`) opens the channel."""

    def __init__(
        self,
        *,
        config: RunpodFleet,
        run: PodRun,
        api: RunpodApi,
        ladder: Ladder,
        records: PodRecords,
        artifacts: ArtifactStore,
        clock: Clock,
    ) -> None:
        self._config = config
        self._run = run
        self._api = api
        self._records = records
        self._clock = clock
        self.channel = PodChannel(
            identity=run.identity,
            spec=run.spec,
            pins=run.pins,
            artifacts=artifacts,
            clock=clock,
            admit=self._admit,
        )
        self.keeper = PodKeeper(
            api=api,
            ladder=ladder,
            records=records,
            config=config,
            prefix=f"{config.pool}-{run.run_id}-",
            clock=clock,
            request=lambda name, step: pod_request(name, step, config, run),
            heard_s=self._heard_s,
            lost=self._lost,
        )
        self._nodes: dict[str, PodNode] = {}
        self._bound: set[str] = set()
        """Pods that a worker of the pool has or waits for."""
        self._free_since_s: dict[str, float] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        """Of launches that wait for a pod to enrol or to be lost."""
        self._tasks: tuple[asyncio.Future[None], ...] = ()
        self._stopping = asyncio.Event()
        self._is_closed = False
        self.port = 0

    @property
    def machine(self) -> str:
        """Machine type in the price table: the dearest rung's."""
        return self._config.machine

    @property
    def lane(self) -> str:
        """Which jobs its workers may take."""
        return "pod"

    async def start(self) -> None:
        """Listen for pods, keep the boot secret in the account, and begin to tick."""
        if self._tasks:
            return
        self._stopping.clear()
        is_open: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = asyncio.ensure_future(self._serve(is_open))
        self._tasks = (serving,)
        await asyncio.wait((serving, is_open), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            self._tasks = ()
            await serving
        self.port = is_open.result()
        try:
            await self._api.keep_secret(
                self._run.secret_name(self._config.pool), self._run.identity.boot_secret
            )
        except RunpodError as error:
            await self.detach()
            hint = (
                "; give the key write access to secrets" if isinstance(error, AccessError) else ""
            )
            raise FleetError(
                f"the boot secret cannot be kept in the account: {error}{hint}"
            ) from error
        self._tasks = (serving, asyncio.ensure_future(self._tick()))

    async def launch(self, name: str) -> PodNode:
        """A worker on a pod that waits for one, or on a new pod; waits for it to boot."""
        node = self._nodes.get(name)
        if node is not None and node.link.gone is None:
            return node
        await self.start()
        await self.terminate(name)
        while True:
            pod = self._spare() or await self.keeper.maker.obtain(self._bound)
            self._bound.add(pod.name)
            self._free_since_s.pop(pod.name, None)
            try:
                link = await self._booted(pod.name)
            except BaseException:
                self._bound.discard(pod.name)
                raise
            if link is not None:
                node = self._nodes[name] = PodNode(name, link, pod.gpu)
                return node
            self._bound.discard(pod.name)

    async def list(self) -> Sequence[str]:
        """Names of workers that run."""
        return sorted(name for name, node in self._nodes.items() if node.link.gone is None)

    async def terminate(self, name: str) -> None:
        """End a worker; its pod stays when it is healthy and was not told to stop."""
        node = self._nodes.pop(name, None)
        if node is None:
            return
        link = node.link
        record = self._records.get(link.name)
        if record is None or record.state == "ending":
            self._bound.discard(link.name)
            return
        if not node.is_told_to_stop and self._is_worth_keeping(link):
            link.restart()
            self._free(link.name)
            return
        self._bound.discard(link.name)
        why = "idle or not needed any more" if node.is_told_to_stop else link.gone or "replaced"
        await self.keeper.end(link.name, why)

    async def sweep(self) -> Sequence[str]:
        """Take over the pods of an earlier controller of this run; ends those not on record."""
        await self.start()
        return await self.keeper.tick()

    async def close(self) -> None:
        """End every pod, with proof; raises `FleetError` that names what is left. May be repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._tasks and not self._records.all():
            await self.detach()
            return
        self._nodes.clear()
        try:
            left = await self.keeper.close(_CLOSE_S)
            if not left:
                with suppress(RunpodError, TimeoutError):
                    async with asyncio.timeout(_FORGET_S):
                        await self._api.drop_secrets(self._run.secret_name(self._config.pool))
        finally:
            await self.detach()
        if left:
            raise FleetError(
                f"pods {', '.join(left)} are not proved gone; they end themselves within "
                f"{self._config.lost_controller_s:g} s; check with: nestling fleet down --all"
            )

    async def detach(self) -> None:
        """Stop listening and leave the pods to the next controller of this run."""
        self._stopping.set()
        tasks, self._tasks = self._tasks, ()
        for task in tasks[1:]:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._api.http.close()

    async def wait_for_pods(self, number: int) -> None:
        """Make pods until `number` are there, and wait for their workers to speak."""
        await self.start()
        async with asyncio.TaskGroup() as group:
            for index in range(number):
                group.create_task(self.launch(f"up-{index}"))
        for name in tuple(self._nodes):
            node = self._nodes.pop(name)
            self._free(node.link.name)

    # --- pods and links ----------------------------------------------------------------------

    async def _serve(self, is_open: asyncio.Future[int]) -> None:
        async with self.channel.listening(self._config.listen) as port:
            is_open.set_result(port)
            await self._stopping.wait()

    async def _tick(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.keeper.run())
            group.create_task(self._reap_spares())

    async def _reap_spares(self) -> None:
        """End pods that no worker of the pool has for so long."""
        while True:
            await asyncio.sleep(min(self._config.tick_s, self._config.idle_s / 4))
            now_s = self._clock.monotonic()
            for name, since_s in list(self._free_since_s.items()):
                if now_s - since_s > self._config.idle_s:
                    self._free_since_s.pop(name)
                    await self.keeper.end(name, f"idle for {self._config.idle_s:g} s")

    def _spare(self) -> PodRecord | None:
        """A pod without a worker of the pool, best one that is up already."""
        free = [
            record
            for record in self._records.all()
            if record.name not in self._bound and record.state in ("made", "ready")
        ]
        return min(
            free, key=lambda one: (one.name not in self.channel.links, one.made_at), default=None
        )

    def _free(self, name: str) -> None:
        self._bound.discard(name)
        self._free_since_s[name] = self._clock.monotonic()

    async def _booted(self, name: str) -> PodLink | None:
        """The link of a pod once its worker has spoken; None when it is lost before."""
        while True:
            record = self._records.get(name)
            if record is None or record.state == "ending":
                return None
            link = self.channel.links.get(name)
            if link is not None and link.gone is None:
                return link
            if link is not None and self._is_worth_keeping(link):
                link.restart()  # its worker process died while nobody had it
                return link
            if link is not None:
                await self.keeper.end(name, link.gone or "replaced")
                return None
            news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(news)
            await news

    async def _admit(self, name: str, life: str, drifted: Sequence[str]) -> str | None:
        record = self._records.get(name)
        if record is not None and record.state == "wanted":
            raise TooEarlyError(f"pod {name} is not known to be made yet")
        if record is None or record.state == "ending":
            return "not wanted"
        if drifted:
            self.keeper.maker.failure = FleetError(
                f"what is installed in the pods is not what this controller runs: "
                f"{'; '.join(drifted)}; build the image from this very version, or correct fleet.pins"
            )
            await self.keeper.end(name, "its software has drifted")
            return "drift"
        if record.life not in ("", life):
            await self.keeper.end(name, "its container was restarted")
            return "restarted"
        if record.state == "made":
            await self._records.ready(name, life)
        if name not in self._bound:
            self._free_since_s.setdefault(name, self._clock.monotonic())
        asyncio.get_running_loop().call_soon(self._tell)
        return None

    def _lost(self, name: str, why: str) -> None:
        link = self.channel.links.get(name)
        if link is not None:
            link.end(why)
        self.channel.forget(name)
        self._free_since_s.pop(name, None)
        self._tell()

    def _tell(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for news in waiting:
            if not news.done():
                news.set_result(None)

    def _heard_s(self, name: str) -> float | None:
        link = self.channel.links.get(name)
        return None if link is None else link.heard_s

    def _is_worth_keeping(self, link: PodLink) -> bool:
        silent_s = self._clock.monotonic() - link.heard_s
        is_spent = link.num_done == 0 and link.num_restarts >= _MAX_RESTARTS
        return silent_s < self._config.heartbeat_s / 2 and not link.is_leaving and not is_spent
