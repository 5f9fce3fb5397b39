"""`nestling serve`: one of our models behind an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Literal

import click

from nestling.cli.options import say

__all__ = ["command"]


@click.command("serve")
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Others need a token.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="0: any free one.",
)
@click.option("--name", help="Id of the model in the API; default: the folder's name.")
@click.option(
    "--slots", type=click.IntRange(1, 4096), default=16, show_default=True,
    help="Conversations decoded together.",
)  # fmt: skip
@click.option(
    "--max-len", type=click.IntRange(2), default=None, metavar="TOKENS",
    help="Of one conversation; default: what the model takes, at most 8192.",
)  # fmt: skip
@click.option("--device", default="cpu", show_default=True, help="Such as cpu or cuda.")
@click.option(
    "--tools", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True,
    help="Put the tools into the prompt; auto: when the model's chat template does.",
)  # fmt: skip
@click.option(
    "--token-env", default="NESTLING_SERVE_TOKEN", show_default=True, metavar="NAME",
    help="Environment variable with the token that clients must send.",
)  # fmt: skip
def command(
    model: str,
    host: str,
    port: int,
    name: str | None,
    slots: int,
    max_len: int | None,
    device: str,
    tools: Literal["auto", "always", "never"],
    token_env: str,
) -> int:
    """Serve MODEL: a base model, a shipped agent, a model folder, or a run (its newest agent).

    The URL is the one line on standard output. SIGINT or SIGTERM ends it.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from nestling.bench.agents import model_folder
    from nestling.engine.serve import ServeConfig, serve, shows_tools
    from nestling.families import bases

    folder = bases.get(model).folder if model in bases.names() else model_folder(model)
    config = ServeConfig(
        name=name or _name(model),
        host=host,
        port=port,
        token=os.environ.get(token_env) or None,
        num_slots=slots,
        max_len=max_len or 0,
        shows_tools=shows_tools(folder, tools),
    )
    say(f"loading {folder}")
    asyncio.run(serve(folder, config, click.echo, device=device))
    return 0


def _name(model: str) -> str:
    return Path(model).resolve().name
