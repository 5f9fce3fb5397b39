"""`nestling dash`: the live dashboard of runs in a browser."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click

from nestling.cli.options import say

__all__ = ["command"]


@click.command("dash")
@click.argument("run", metavar="[RUN]", default="runs", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Others need a token.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8765,
    show_default=True,
    help="0: any free one.",
)
@click.option(
    "--token-env", default="NESTLING_DASH_TOKEN", show_default=True, metavar="NAME",
    help="Environment variable with the token that browsers must bring.",
)  # fmt: skip
def command(run: Path, host: str, port: int, token_env: str) -> int:
    """Show the run folder RUN, or every run in a folder of runs, while it goes on or after.

    Run stores are only read. The address is the one line on standard output. Outside loopback a
    token is part of it: the one of the environment, else a random one. SIGINT or SIGTERM ends it.
    """
    from nestling.dash.server import DashConfig, serve

    config = DashConfig(host=host, port=port, token=os.environ.get(token_env) or None)
    say(f"showing {run}; end with Ctrl+C")
    asyncio.run(serve(run, config, lambda address: click.echo(address)))
    return 0
