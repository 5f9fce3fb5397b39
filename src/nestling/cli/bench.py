"""`nestling bench`: measurements, each with the machine and the versions it belongs to."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

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
    from nestling.bench.record import BenchRecord, Measured

__all__ = ["command", "measured"]

_RESULTS = Path("results") / "bench"
_FAMILIES = "Names, or training, held_out, all."


@click.group("bench", cls=Commands)
def command() -> None:
    """Measure jobs and this machine."""


@command.command("list")
def list_benchmarks() -> int:
    """Names and what they measure."""
    from nestling.bench.registry import BENCHMARKS

    print_table(("benchmark", "measures"), list(BENCHMARKS.items()))
    return 0


@command.command("spread")
@click.option(
    "--families", default="training", show_default=True, metavar="A,B,...",
    help="Names, or training, held_out, all.",
)  # fmt: skip
@click.option("--seeds", type=click.IntRange(1, 100), default=3, show_default=True)
@click.option("--items", type=click.IntRange(8, 10_000), help="Hidden items per score.")
@click.option("--jobs", metavar="A,B,...", help="Some of the reference jobs only.")
@click.option(
    "--workers", type=click.IntRange(1, 1024), metavar="N",
    help="Families measured at the same time; default: one per core.",
)  # fmt: skip
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=_RESULTS / "spread.json",
    show_default=True,
    help="File for the figures.",
)
@room_options
@json_option
def spread(
    families: str,
    seeds: int,
    items: int | None,
    jobs: str | None,
    workers: int | None,
    out: Path,
    settings: tuple[str, ...],
    unsafe_no_jail: bool,
    as_json: bool,
) -> int:
    """How far good and bad jobs lie apart: template, worse settings, a bad rubric, no-op."""
    names = families_of(families)
    changes = [*settings, *([f"inner.eval_items={items}"] if items is not None else [])]
    config = recipe(changes, unsafe_no_jail=unsafe_no_jail)
    from nestling.bench.spread import JOBS, measure

    chosen = tuple(part.strip() for part in jobs.split(",")) if jobs else JOBS
    slots = workers or len(os.sched_getaffinity(0))
    record = measured(
        "spread",
        lambda: measure(config, families=names, seeds=seeds, jobs=chosen, workers=slots),
        out,
    )
    if as_json:
        print_json(record.model_dump(mode="json"))
    return 0


@command.command("engine")
@click.option("--runs", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=_RESULTS / "engine.json",
    show_default=True,
    help="File for the figures.",
)
@json_option
def engine(runs: int, out: Path, as_json: bool) -> int:
    """Speed on one CPU thread, beside transformers and TRL where installed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from nestling.bench.engine import measure

    record = measured("engine", lambda: measure(runs=runs), out)
    if as_json:
        print_json(record.model_dump(mode="json"))
    return 0


@command.command("plumbing")
@click.option("--families", default="all", show_default=True, metavar="A,B,...", help=_FAMILIES)
@click.option("--runs", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=_RESULTS / "plumbing.json",
    show_default=True,
    help="File for the figures.",
)
@json_option
def plumbing(families: str, runs: int, out: Path, as_json: bool) -> int:
    """What a rollout costs beside the model, and in verifiers' own lifecycle."""
    names = families_of(families)
    from nestling.bench.plumbing import measure

    record = measured("plumbing", lambda: measure(families=names, runs=runs), out)
    if as_json:
        print_json(record.model_dump(mode="json"))
    return 0


@command.command("probe")
@click.option("--families", default="all", show_default=True, metavar="A,B,...", help=_FAMILIES)
@click.option("--runs", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=_RESULTS / "probe.json",
    show_default=True,
    help="File for the figures.",
)
@room_options
@json_option
def probe(
    families: str,
    runs: int,
    out: Path,
    settings: tuple[str, ...],
    unsafe_no_jail: bool,
    as_json: bool,
) -> int:
    """How long the probe of a template job takes with a warm worker."""
    names = families_of(families)
    config = recipe(list(settings), unsafe_no_jail=unsafe_no_jail)
    from nestling.bench.probe import measure

    record = measured("probe", lambda: measure(config, families=names, runs=runs), out)
    if as_json:
        print_json(record.model_dump(mode="json"))
    return 0


@command.command("job")
@click.option(
    "--families", default="training", show_default=True, metavar="A,B,...", help=_FAMILIES
)
@click.option("--runs", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=_RESULTS / "job.json",
    show_default=True,
    help="File for the figures.",
)
@room_options
@json_option
def job(
    families: str,
    runs: int,
    out: Path,
    settings: tuple[str, ...],
    unsafe_no_jail: bool,
    as_json: bool,
) -> int:
    """CPU seconds of a template job, part by part."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = families_of(families)
    config = recipe(list(settings), unsafe_no_jail=unsafe_no_jail)
    from nestling.bench.job import measure

    record = measured("job", lambda: measure(config, families=names, runs=runs), out)
    if as_json:
        print_json(record.model_dump(mode="json"))
    return 0


@command.command("gpu")
@click.option("--parts", metavar="A,B,...", help="Some parts only; `--list` shows them.")
@click.option("--list", "list_parts", is_flag=True, help="Names of the parts, and end.")
@click.option(
    "--device", default="", metavar="NAME", help="cuda:0, ..., cpu; default: the first GPU."
)
@click.option("--shapes", metavar="A,B,...", help="nano, micro, smollm2-135m.")
@click.option("--jobs", type=click.IntRange(1, 1000), help="Whole jobs of a batch on one device.")
@click.option("--workers", type=click.IntRange(1, 1000), help="Processes that run whole jobs.")
@click.option("--again", is_flag=True, help="Measure the parts again that are on disk.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=_RESULTS / "gpu.json",
    show_default=True,
    help="File for the figures; finished parts are kept in a folder beside it.",
)
@room_options
@json_option
def gpu(
    parts: str | None,
    list_parts: bool,
    device: str,
    shapes: str | None,
    jobs: int | None,
    workers: int | None,
    again: bool,
    out: Path,
    settings: tuple[str, ...],
    unsafe_no_jail: bool,
    as_json: bool,
) -> int:
    """Speed and memory on a GPU, part by part; a part that is on disk is not measured again."""
    from nestling.bench.gpu import PARTS, default_sizes, measure

    if list_parts:
        print_table(("part", "measures"), list(PARTS.items()))
        return 0
    sizes = default_sizes(device)
    sizes = replace(
        sizes,
        shapes=tuple(shapes.split(",")) if shapes else sizes.shapes,
        jobs=jobs or sizes.jobs,
        workers=workers or jobs or sizes.workers,
    )
    config = recipe(settings, unsafe_no_jail=unsafe_no_jail)
    kept = out.with_suffix("")
    chosen = tuple(parts.split(",")) if parts else tuple(PARTS)[:-1]
    for part in chosen if again else ():
        for path in kept.glob(f"{part}-*.json"):
            path.unlink()
    record = measured(
        "gpu",
        lambda: measure(parts=chosen, device=device, sizes=sizes, kept=kept, config=config),
        out,
    )
    if as_json:
        print_json(record.model_dump(mode="json"))
    return 0


@command.command("all")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=_RESULTS,
    show_default=True,
    help="Folder; one file per benchmark.",
)
@json_option
def run_all(out: Path, as_json: bool) -> int:
    """Every benchmark with its default settings."""
    from nestling.bench.registry import BENCHMARKS, measure_of

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    records = {}
    for name in BENCHMARKS:
        say(f"{name}: {BENCHMARKS[name]}")
        records[name] = measured(name, measure_of(name), out / f"{name}.json")
    if as_json:
        print_json({name: one.model_dump(mode="json") for name, one in records.items()})
    return 0


def measured(name: str, measure: Callable[[], Measured], out: Path) -> BenchRecord:
    """Measure, print the table, write the record."""
    from nestling.bench.record import record
    from nestling.core.clock import SystemClock
    from nestling.core.rundir import write_atomic

    clock = SystemClock()
    started_s = clock.monotonic()
    measured = measure()
    done = record(
        name,
        measured,
        command=shlex.join(["nestling", *sys.argv[1:]]),
        wall_s=clock.monotonic() - started_s,
        clock=clock,
    )
    print_table(measured.columns, measured.rows)
    write_atomic(out, (done.model_dump_json(indent=2) + "\n").encode())
    say(f"wrote {out}")
    return done
