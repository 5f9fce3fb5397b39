"""`nestling fleet`: what a pool of workers does and costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nestling.cli import pods
from nestling.cli.bench import measured, out_option
from nestling.cli.options import (
    Commands,
    families_of,
    json_option,
    print_json,
    print_table,
    recipe,
    room_options,
    say,
)

if TYPE_CHECKING:
    from nestling.fleet.simulate import SimulationReport
    from nestling.fleet.simulate_seeds import SeedsReport

__all__ = ["command"]


@click.group("fleet", cls=Commands)
def command() -> None:
    """Rent pods, simulate a fleet of workers, measure what jobs cost on it."""


pods.add_to(command)


@command.command("bench")
@click.option("--families", metavar="A,B,...", help="Whose template jobs; default: two of them.")
@click.option("--bases", metavar="A,B,...", help="Base models; default: all shipped ones.")
@click.option("--jobs", type=click.IntRange(1, 100), default=6, show_default=True,
              help="Of each family and base.")  # fmt: skip
@out_option("fleet")
@room_options
@json_option
def bench(
    families: str | None,
    bases: str | None,
    jobs: int,
    out: Path,
    settings: tuple[str, ...],
    unsafe_no_jail: bool,
    as_json: bool,
) -> None:
    """Seconds and money of a job by machine type and base, and where it is cheapest.

    Measured with real jobs on this machine; other types from past jobs, else from their price.
    """
    names = None if families is None else families_of(families)
    models = None if bases is None else tuple(part.strip() for part in bases.split(","))
    config = recipe(settings, unsafe_no_jail=unsafe_no_jail)
    from nestling.bench.fleet import measure

    record = measured(
        "fleet", lambda: measure(config, families=names, jobs=jobs, models=models), out
    )
    for base, machine in record.figures["cheapest"].items():
        say(f"cheapest for {base}: {machine}")
    if as_json:
        print_json(record.model_dump(mode="json"))


@command.command("simulate")
@click.option("--jobs", type=click.IntRange(1), default=40, show_default=True,
              help="Jobs of all groups together.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1), default=16, show_default=True,
              help="Workers in the pool.")  # fmt: skip
@click.option(
    "--deaths-per-minute", type=click.FloatRange(0, 1, max_open=True), default=0.0,
    show_default=True, help="Share of the busy workers that die in a minute; 0.01 is 1 %.",
)  # fmt: skip
@click.option(
    "--stragglers", type=click.FloatRange(0, 1), default=0.0, show_default=True,
    help="Share of the tries that take four times as long.",
)  # fmt: skip
@click.option("--mean-s", type=click.FloatRange(0, min_open=True), default=240.0,
              show_default=True, help="Mean length of a job.")  # fmt: skip
@click.option("--sigma", type=click.FloatRange(0), default=0.6, show_default=True,
              help="Spread of the logarithm of the length.")  # fmt: skip
@click.option(
    "--prediction-sigma", type=click.FloatRange(0), default=0.2, show_default=True,
    help="Error of the logarithm of the predicted length.",
)  # fmt: skip
@click.option("--no-predictions", is_flag=True, help="Jobs in the order in which they came.")
@click.option("--groups", type=click.IntRange(1), default=1, show_default=True,
              help="Groups that share the workers.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of lengths and faults.")
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True,
              help="This many seeds, and their spread.")  # fmt: skip
@click.option("--writer-thread", is_flag=True, help="Commit in a thread, as a run does; slower.")
@click.option(
    "--folder", type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Keep the run store there.",
)  # fmt: skip
@json_option
@click.pass_context
def simulate(
    context: click.Context,
    *,
    jobs: int,
    workers: int,
    deaths_per_minute: float,
    stragglers: float,
    mean_s: float,
    sigma: float,
    prediction_sigma: float,
    no_predictions: bool,
    groups: int,
    seed: int,
    seeds: int,
    writer_thread: bool,
    folder: Path | None,
    as_json: bool,
) -> None:
    """The real queue, pool and store against simulated workers, without waiting.

    Exits 1 when a job was lost or counted twice.
    """
    from nestling.fleet.simulate import Simulation, simulate
    from nestling.fleet.simulate_seeds import simulate_seeds
    from nestling.fleet.simulate_workers import Hazards

    simulation = Simulation(
        num_jobs=jobs,
        num_workers=workers,
        mean_s=mean_s,
        sigma=sigma,
        prediction_sigma=None if no_predictions else prediction_sigma,
        num_groups=groups,
        hazards=Hazards(deaths_per_minute=deaths_per_minute, straggler_share=stragglers, seed=seed),
        seed=seed,
        writer_thread=writer_thread,
    )
    report: SimulationReport | SeedsReport
    if seeds > 1:
        if folder is not None:
            raise click.UsageError("--folder keeps one run store; expected it without --seeds")
        report = simulate_seeds(simulation, seeds)
    else:
        report = simulate(simulation, folder)
    if as_json:
        print_json(report.as_json())
    else:
        _show(report)
    if report.lost or report.duplicated:
        say("error: jobs were lost or counted twice")
        context.exit(1)


def _show(report: SimulationReport | SeedsReport) -> None:
    figures = report.as_json()
    print_table(
        ("figure", "value"),
        [
            (name if within is None else f"{name}.{within}", f"{value}")
            for name, outer in figures.items()
            for within, value in (outer.items() if isinstance(outer, dict) else [(None, outer)])
        ],
    )
