"""Looks at a whole account, whatever runs know: what is there, and the last broom."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from nestling.fleet.pods.list import PodLine, Swept
from nestling.fleet.providers.runpod_api import ApiPod, RunpodApi
from nestling.fleet.providers.runpod_errors import RateLimitedError, RunpodError, UncertainError

__all__ = ["PodAccount"]

_log = logging.getLogger(__name__)

_LOOK_S = 2.0
_PROOFS = 2
"""Looks in a row that must find nothing: a list may lag behind."""


class PodAccount:
    """Pods of one account whose names begin with a prefix."""

    def __init__(self, api: RunpodApi) -> None:
        self._api = api

    async def pods(self, prefix: str) -> list[PodLine]:
        """Those that exist; raises `RunpodError`."""
        return [
            PodLine(
                name=pod.name,
                id=pod.id,
                status=pod.status,
                usd_per_hour=pod.cost,
                up_s=pod.runtime.uptime if pod.runtime is not None else 0.0,
            )
            for pod in await self._found(prefix)
        ]

    async def end_all(self, prefix: str, *, limit_s: float, told: Callable[[str], None]) -> Swept:
        """Terminate them all, then look until list and addresses show nothing more.

        Raises `RunpodError` when the account cannot be read at all.
        """
        ids: dict[str, str] = {}
        clean = 0
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        left = [""]
        while True:
            try:
                found = await self._found(prefix)
                ids |= {pod.id: pod.name for pod in found}
                left = await self._still_there(found, ids)
                for pod_id in left:
                    told(f"ending {ids[pod_id]}")
                    await self._delete(pod_id)
                clean = 0 if left else clean + 1
            except (UncertainError, RateLimitedError) as error:
                _log.warning("%s; trying again", error)
                clean = 0
            if clean >= _PROOFS or loop.time() >= end_s:
                break
            await asyncio.sleep(_LOOK_S if left else _LOOK_S / 2)
        names = sorted(set(ids.values()))
        remaining = sorted({ids.get(pod_id, "(unknown)") for pod_id in left})
        if clean < _PROOFS and not remaining:
            remaining = ["(unknown)"]
        if not remaining:
            await self._drop_secrets(prefix)
        return Swept(ended=[name for name in names if name not in remaining], left=remaining)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.http.close()

    async def _found(self, prefix: str) -> list[ApiPod]:
        return [pod for pod in await self._api.list_pods() if pod.name.startswith(prefix)]

    async def _still_there(self, found: list[ApiPod], ids: dict[str, str]) -> list[str]:
        """Ids that the list shows or that still have an address."""
        listed = {pod.id for pod in found}
        unlisted = [pod_id for pod_id in ids if pod_id not in listed]
        hidden = [one for one in unlisted if await self._api.get_pod(one) is not None]
        return [*listed, *hidden]

    async def _delete(self, pod_id: str) -> None:
        try:
            await self._api.delete_pod(pod_id)
        except (UncertainError, RateLimitedError):
            raise
        except RunpodError as error:
            _log.error("%s", error)

    async def _drop_secrets(self, prefix: str) -> None:
        """Boot secrets of runs that have no pods any more; named like their pods."""
        name = prefix.rstrip("-").replace("-", "_")
        try:
            await self._api.drop_secrets(name if "_" in name else f"{name}_")
        except RunpodError as error:
            _log.warning("the boot secrets could not be removed: %s", error)
