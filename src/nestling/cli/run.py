"""`nestling run`: the nested loop from a recipe; resumes by default."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from nestling.cli.options import json_option, set_option
from nestling.config import RunConfig, load_recipe, recipe_toml
from nestling.trackers.tracker import KINDS, TrackerKind

if TYPE_CHECKING:
    from nestling.outer.step_report import StepReport
    from nestling.outer.sweep_report import Sweep
    from nestling.store.money import Spending

__all__ = ["command"]


@click.command("run")
@click.argument("recipe", required=False, type=click.Path(path_type=Path, dir_okay=False))
@set_option
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Run folder.")
@click.option(
    "--resume",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Continue the run in this folder.",
)
@click.option("--unsafe-no-jail", is_flag=True, help="Run agent-written code without a jail.")
@click.option(
    "--track", "trackers", type=click.Choice(KINDS), multiple=True,
    help="Send metrics to an experiment tracker; may be given several times.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show the plan and its ceiling; run nothing.")
@json_option
def command(
    recipe: Path | None,
    settings: tuple[str, ...],
    out: Path | None,
    resume: Path | None,
    unsafe_no_jail: bool,
    trackers: tuple[TrackerKind, ...],
    dry_run: bool,
    as_json: bool,
) -> int:
    """Train the agent: it writes jobs, the jobs train small models, their scores train it.

    An interrupted run continues when the same command is given again.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if unsafe_no_jail:
        settings = (*settings, "unsafe_no_jail=true")
    if resume is not None:
        config, folder = load_recipe(resume / "config.toml", settings), resume
    else:
        config = load_recipe(recipe, settings)
        folder = out or Path("runs") / config.name
    console = Console(stderr=True)
    if dry_run:
        _show_plan(config, folder, as_json=as_json)
        return 0
    return _run(config, folder, console, trackers, as_json=as_json)


def _run(
    config: RunConfig,
    folder: Path,
    console: Console,
    trackers: tuple[TrackerKind, ...],
    *,
    as_json: bool,
) -> int:
    from nestling.cli.progress import RunProgress
    from nestling.report.page import write_report
    from nestling.trackers.follow import following, tracked
    from nestling.wiring.runs import RunHooks, play_run

    outer = config.outer
    episodes = outer.groups_per_step * outer.group_size
    title = f"{config.name}: {outer.steps} steps of {episodes} episodes in {folder}"
    progress = RunProgress(console, steps=outer.steps, title=title)
    console.print(title, highlight=False)
    if outer.held_out.every_steps:
        measured = "reference policies and the untrained agent are measured beside the first steps"
        console.print(f"{measured}; live: nestling dash {folder}", highlight=False)
    try:
        run = tracked(folder, config.name, config.model_dump(mode="json"))
        with following(trackers, run) as follower, progress.shown():

            def on_step(report: StepReport) -> None:
                progress.on_step(report)
                follower.on_step(report)

            def on_sweep(step: int, sweep: Sweep) -> None:
                progress.on_sweep(step, sweep)
                follower.on_sweep(step, sweep)

            hooks = RunHooks(on_step=on_step, on_episode=progress.on_episode, on_sweep=on_sweep)
            done = asyncio.run(play_run(config, folder, hooks))
    except KeyboardInterrupt:
        console.print(f"interrupted; continue with: nestling run --resume {folder}")
        return 130
    page = write_report(folder)
    spending = _spending(folder)
    _show_spending(spending, console)
    console.print(f"done: {done.step} steps; report: {page}", highlight=False)
    if as_json:
        shown = {"steps": done.step, "folder": str(folder), "report": str(page)}
        click.echo(json.dumps(shown | {"spending": [asdict(row) for row in spending]}))
    return 0


def _show_plan(config: RunConfig, folder: Path, *, as_json: bool) -> None:
    from nestling.wiring.plans import plan_run

    plan = plan_run(config)
    click.echo(recipe_toml(config))
    click.echo(f"# folder: {folder}")
    for line in plan.lines():
        click.echo(f"# {line}")
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "plan": plan.as_json()}))


def _spending(folder: Path) -> list[Spending]:
    from nestling.store import RunStore

    with RunStore.open_reader(folder / "run.db") as store:
        return store.money.spending()


def _show_spending(rows: list[Spending], console: Console) -> None:
    from nestling.fleet.accounting import added_up

    for key in ("machine", "family"):
        for row in added_up(rows, key):
            name = getattr(row, key) or "no family"
            console.print(
                f"{key} {name}: {row.tries} jobs, {row.seconds / 60:.1f} worker minutes,"
                f" {row.usd:.4f} USD",
                highlight=False,
            )
    predicted_s = sum(row.predicted_s for row in rows)
    if predicted_s:
        took_s = sum(row.predicted_took_s for row in rows)
        console.print(
            f"predicted {predicted_s / 60:.1f} worker minutes, took {took_s / 60:.1f}",
            highlight=False,
        )
