"""A Runpod account on this machine: the API on loopback, a real worker process in every pod.

For tests, and for a dry rehearsal of a whole run with its costs: the same recipe, another address.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from nestling.fleet.pods.channel import listening_socket, quiet_server
from nestling.fleet.runpod_simulator.account import Account, SimulatedTime
from nestling.fleet.runpod_simulator.app import RunpodApp
from nestling.fleet.runpod_simulator.script import Script

__all__ = ["SimulatedRunpod", "simulated_account", "simulated_runpod"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRunpod:
    """A running simulator."""

    url: str
    """For `fleet.api_url`."""
    key: str
    """For RUNPOD_API_KEY; the same with `-read` may only look."""
    app: RunpodApp


@asynccontextmanager
async def simulated_account(
    script: Script, folder: Path, *, speed: float = 1.0, key: str = ""
) -> AsyncIterator[RunpodApp]:
    """The API as an ASGI application whose time goes on inside the block; pods end with it."""
    account = Account(script, SimulatedTime(speed), folder, key or f"sim-{secrets.token_hex(16)}")
    living = asyncio.ensure_future(account.live())
    try:
        yield RunpodApp(account)
    finally:
        living.cancel()
        await asyncio.wait((living,))
        await asyncio.to_thread(account.close)


@asynccontextmanager
async def simulated_runpod(
    script: Script,
    *,
    folder: Path | None = None,
    listen: str = "127.0.0.1:0",
    speed: float = 1.0,
    key: str = "",
) -> AsyncIterator[SimulatedRunpod]:
    """Serve it on loopback inside the block; `folder` keeps logs and disks of pods."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="nestling-runpod-") as made:
            async with simulated_runpod(
                script, folder=Path(made), listen=listen, speed=speed, key=key
            ) as running:
                yield running
        return
    async with simulated_account(script, folder, speed=speed, key=key) as app:
        taken = listening_socket(listen, setting="--listen")
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        async with quiet_server(config, taken):
            url = f"http://127.0.0.1:{taken.getsockname()[1]}/v2"
            yield SimulatedRunpod(url=url, key=app.account.key, app=app)
