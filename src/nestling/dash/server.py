"""Listen for browsers until told to end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import uvicorn

from nestling.core.clock import Clock, SystemClock
from nestling.core.listening import base_url, bound_socket
from nestling.dash.app import DashApp
from nestling.dash.runs import require_runs

__all__ = ["DashConfig", "Listening", "listening", "serve"]

_LOOPBACK: Final = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class DashConfig:
    """Where the dashboard listens."""

    host: str = "127.0.0.1"
    port: int = 8765
    """0: any free one."""
    token: str | None = None
    """Asked of every browser. Outside loopback there always is one: a random one by default."""


@dataclass(frozen=True, slots=True)
class Listening:
    """A dashboard that answers."""

    address: str
    """To open in a browser, with the token where there is one."""
    task: asyncio.Task[None]
    """Done when the server was told to end."""


@asynccontextmanager
async def listening(
    where: Path, config: DashConfig, clock: Clock | None = None
) -> AsyncIterator[Listening]:
    """Answer inside the block.

    Raises `ConfigError` when there is no run below `where` or the port is taken.
    """
    require_runs(where)
    is_local = config.host in _LOOPBACK
    token = config.token or (None if is_local else secrets.token_urlsafe(24))
    # On loopback other names are refused: a web page could point a name of its own here.
    hosts = [*_LOOPBACK] if is_local else ["*"]
    app = DashApp(where, clock or SystemClock(), token=token, hosts=hosts)
    bound = bound_socket(config.host, config.port)
    server = _Server(app)
    address = f"{base_url(config.host, bound)}/"
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(server.serve(sockets=[bound]))
        tasks.create_task(asyncio.to_thread(app.warm))
        while not server.started and not running.done():  # noqa: ASYNC110 (a flag is all there is)
            await asyncio.sleep(0.005)
        try:
            yield Listening(f"{address}?token={token}" if token else address, running)
        finally:
            app.close()
            server.should_exit = True


async def serve(where: Path, config: DashConfig, told: Callable[[str], None]) -> None:
    """Serve until the process is told to end (SIGINT, SIGTERM); `told` gets the address."""
    async with listening(where, config) as server:
        told(server.address)
        await asyncio.wait([server.task])


class _Server(uvicorn.Server):
    """Ends the open event streams when it is told to end, or it would wait for them."""

    def __init__(self, app: DashApp) -> None:
        super().__init__(
            uvicorn.Config(
                app.asgi,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=3,
                server_header=False,
            )
        )
        self._dash = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGINT or SIGTERM."""
        self._dash.close()
        super().handle_exit(sig, frame)
