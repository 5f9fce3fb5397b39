"""The first process of a pod: takes work from the controller, and ends the pod when it is not needed.

    python -m nestling.fleet.pods.worker

Jobs are done by an ordinary `fleet.worker` process with the ordinary handlers, so they give what
they give on any other machine. This process fetches bundles, relays messages, wipes between jobs and
restarts the worker on request. It never simply exits, because a container whose command exits is
started again and billed on: it asks the API to terminate the pod until the pod is gone. It does so
when idle, when no controller answers, when it is too old, and when what is installed here has
drifted from what the controller expects.

Environment: `NESTLING_POD` (JSON, `Boot`; nothing in it is secret), `NESTLING_BOOT_KEY` (filled in
from a secret of the account), `RUNPOD_POD_ID` and `RUNPOD_API_KEY` (set by the platform; the key is
the pod's own), `NESTLING_POD_FOLDER` (default: under the temporary folder).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx

from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError
from nestling.fleet.pods.boot import API_URL, BOOT_KEY_VARIABLE, Boot, read_boot
from nestling.fleet.pods.child import PodFolder
from nestling.fleet.pods.client import PodClient
from nestling.fleet.pods.identity import PodIdentity
from nestling.fleet.pods.supervisor import Supervisor

__all__ = ["main"]

_TERMINATE_AGAIN_S = 20.0

_log = logging.getLogger(__name__)


async def terminate_this_pod(api_url: str, pod_id: str, key: str) -> None:
    """Ask the API until the platform ends us; returns only when there is nothing to ask with."""
    if not pod_id or not key:
        return
    headers = {"authorization": f"Bearer {key}", "user-agent": "nestling-pod"}
    async with httpx.AsyncClient(headers=headers, timeout=15.0, trust_env=False) as http:
        while True:
            with suppress(httpx.HTTPError):
                await http.post(f"{api_url}/pods/{pod_id}/action", json={"action": "terminate"})
            await asyncio.sleep(_TERMINATE_AGAIN_S)


async def _live(environment: Mapping[str, str]) -> None:
    """A pod's whole life; whatever ends it, the pod is terminated, as it would be billed on."""
    api_url = API_URL
    try:
        boot = read_boot(environment)
        api_url = boot.api_url
        why = await _serve(boot, environment)
    except ConfigError as error:
        why = str(error)
    except Exception:  # noqa: BLE001 (a defect of ours must not be billed for ever)
        why = traceback.format_exc()
    _log.error("this pod ends itself: %s", why)
    key = environment.get("RUNPOD_API_KEY", "")
    await terminate_this_pod(api_url, environment.get("RUNPOD_POD_ID", ""), key)


async def _serve(boot: Boot, environment: Mapping[str, str]) -> str:
    boot_key = PodIdentity.boot_key_of(environment.get(BOOT_KEY_VARIABLE, ""))
    default = Path(tempfile.gettempdir()) / f"nestling-pod-{os.geteuid()}"
    folder = PodFolder(Path(environment.get("NESTLING_POD_FOLDER") or default))
    folder.remove()  # of an earlier life of this container
    try:
        async with PodClient(boot.address, boot.certificate) as client:
            return await Supervisor(boot, boot_key, client, folder, SystemClock()).run()
    finally:
        folder.remove()


def main() -> int:
    """Entry point of the container."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    environment = dict(os.environ)
    for name in (BOOT_KEY_VARIABLE, "RUNPOD_API_KEY"):
        os.environ.pop(name, None)  # not for children
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    asyncio.run(_live(environment))
    return 1


if __name__ == "__main__":
    sys.exit(main())
