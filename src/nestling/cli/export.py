"""`nestling export`: a run's trained agent as a model folder with a card."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import click

from nestling.cli.options import json_option, print_json

__all__ = ["command"]


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--step", type=click.IntRange(0), help="Default: the newest saved one; 0: untrained.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="A folder that does not exist yet.",
)
@click.option("--adapter-only", is_flag=True, help="For an adapter: leave out base/ and merged/.")
@click.option(
    "--rank",
    type=click.IntRange(1, 1024),
    help="Write an agent trained with all weights as the nearest adapter of this rank.",
)
@json_option
def command(
    run: Path, step: int | None, out: Path, adapter_only: bool, rank: int | None, as_json: bool
) -> int:
    """Write the agent of RUN as a Hugging Face folder, or as a PEFT folder when it is an adapter.

    The README.md in it says how the agent was made and what it scores, from the run itself.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from nestling.outer.export import export_agent
    from nestling.wiring.agents import agent_folder, load_agent

    done = export_agent(
        run,
        out,
        find_base=agent_folder,
        load_base=lambda folder: load_agent(folder, "cpu"),
        step=step,
        adapter_only=adapter_only,
        rank=rank,
        command=shlex.join(["nestling", *sys.argv[1:]]),
    )
    kept = "" if done.kept == 1.0 else f", {done.kept:.1%} of what training changed"
    click.echo(f"{done.kind} of step {done.step}, {done.params:,} parameters{kept}: {done.folder}")
    if as_json:
        print_json(
            {
                "folder": str(done.folder),
                "kind": done.kind,
                "step": done.step,
                "version": done.version,
                "params": done.params,
                "kept": round(done.kept, 4),
            }
        )
    return 0
