"""`nestling cookbook`: our episodes under tinker-cookbook's own training loop."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click

from nestling.cli.options import say, set_option
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
    OUT/cookbook. Unlike `nestling run` it forgets the episodes that an interruption cuts off, and
    does not keep learner.max_usd.
    """
    from nestling.outer.config import TinkerConfig
    from nestling.wiring.runs import play_cookbook

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = load_recipe(recipe, settings)
    if isinstance(config.learner, TinkerConfig) and config.learner.max_usd is not None:
        say(
            f"warning: learner.max_usd={config.learner.max_usd:g} is not kept here, the cookbook's loop "
            "makes its own calls; watch what it spends in the service's console"
        )
    asyncio.run(play_cookbook(config, out))
    say(f"done: {out / 'cookbook'}")
    return 0
