"""`nestling track`: send what a run has recorded to an experiment tracker."""

from __future__ import annotations

from pathlib import Path

import click

from nestling.cli.options import say
from nestling.core.errors import ConfigError
from nestling.trackers.tracker import KINDS, TrackerKind

__all__ = ["command"]


@click.command("track")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--to", "kinds", type=click.Choice(KINDS), multiple=True, required=True,
    help="Tracker; may be given several times.",
)  # fmt: skip
@click.option("--project", default="nestling", show_default=True, help="Project in the tracker.")
def command(run: Path, kinds: tuple[TrackerKind, ...], project: str) -> int:
    """Send the recorded steps and sweeps of the run folder RUN to experiment trackers.

    To send a run while it goes on, give `nestling run --track`.
    """
    if not (run / "run.db").is_file():
        raise ConfigError(f"{run} holds no run; expected the folder of `nestling run`")
    from nestling.core.rundir import RunDir
    from nestling.report.run_info import run_info
    from nestling.store import RunStore
    from nestling.trackers.follow import following, send_recorded, tracked

    folder = RunDir(run)
    with RunStore.open_reader(folder.database) as store:
        info = run_info(folder, store)
        with following(kinds, tracked(run, info.name, info.config, project)) as follower:
            count = send_recorded(store, follower)
            left = follower.kinds
    say(f"sent {count} steps to {', '.join(left) or 'no tracker'}")
    return 0 if len(left) == len(set(kinds)) else 1
