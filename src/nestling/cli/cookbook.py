"""`nestling cookbook`: our episodes under tinker-cookbook's own training loop."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click

from nestling.cli.options import set_option
from nestling.config import load_recipe

__all__ = ["command"]


@click.command("cookbook")
@click.argument("recipe", type=click.Path(path_type=Path, dir_okay=False))
@set_option
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Run folder."
)
def command(recipe: Path, settings: tuple[str, ...], out: Path) -> int:
    """Train with tinker-cookbook's loop instead of ours; needs the extra `cookbook`.

    The recipe needs `[learner] kind = "tinker"`. The cookbook's logs and checkpoints are in
    OUT/cookbook. It forgets episodes that run when it is interrupted; `nestling run` does not.
    """
    from nestling.wiring.runs import play_cookbook

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(play_cookbook(load_recipe(recipe, settings), out))
    click.echo(f"done: {out / 'cookbook'}", err=True)
    return 0
