"""`nestling bench`: measurements, each with the machine and the versions it belongs to."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nestling.cli.options import (
    Commands,
    families_of,
    families_option,
    json_option,
    print_json,
    print_table,
    recipe,
    room_options,
    say,
)

if TYPE_CHECKING:
    from nestling.bench.record import BenchRecord, Measured

__all__ = ["command", "measured", "out_option"]

_F = TypeVar("_F", bound=Callable[..., Any])

_RESULTS = Path("results") / "bench"
_runs = click.option(
    "--runs", type=click.IntRange(1, 100), default=5, show_default=True,
    help="Repetitions; medians are told.",
)  # fmt: skip


def out_option(name: str, help_text: str = "File for the figures.") -> Callable[[_F], _F]:
    """`--out` of one benchmark."""
    return click.option(
        "--out", type=click.Path(path_type=Path, dir_okay=False),
        default=_RESULTS / f"{name}.json", show_default=True, help=help_text,
    )  # fmt: skip


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
@families_option("training")
@click.option("--seeds", type=click.IntRange(1, 100), default=3, show_default=True,
              help="Training seeds of each job.")  # fmt: skip
@click.option("--items", type=click.IntRange(8, 10_000), help="Hidden items per score.")
@click.option("--jobs", metavar="A,B,...", help="Some of the reference jobs only.")
@click.option(
    "--workers", type=click.IntRange(1, 1024), metavar="N",
    help="Families measured at the same time; default: one per core.",
)  # fmt: skip
@out_option("spread")
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
    return _told(
        "spread",
        lambda: measure(config, families=names, seeds=seeds, jobs=chosen, workers=slots),
        out,
        as_json=as_json,
    )


@command.command("engine")
@_runs
@out_option("engine")
@json_option
def engine(runs: int, out: Path, as_json: bool) -> int:
    """Speed on one CPU thread, beside transformers and TRL where installed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from nestling.bench.engine import measure

    return _told("engine", lambda: measure(runs=runs), out, as_json=as_json)


@command.command("plumbing")
@families_option("all")
@_runs
@out_option("plumbing")
@json_option
def plumbing(families: str, runs: int, out: Path, as_json: bool) -> int:
    """What a rollout costs beside the model, and in verifiers' own lifecycle."""
    names = families_of(families)
    from nestling.bench.plumbing import measure

    return _told("plumbing", lambda: measure(families=names, runs=runs), out, as_json=as_json)


@command.command("probe")
@families_option("all")
@_runs
@out_option("probe")
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

    return _told("probe", lambda: measure(config, families=names, runs=runs), out, as_json=as_json)


@command.command("job")
@families_option("training")
@_runs
@out_option("job")
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

    return _told("job", lambda: measure(config, families=names, runs=runs), out, as_json=as_json)


@command.command("gpu")
@click.option("--parts", metavar="A,B,...", help="See `--list`; default: all but devices.")
@click.option("--list", "list_parts", is_flag=True, help="Names of the parts, and end.")
@click.option(
    "--device", default="", metavar="NAME", help="cuda:0, ..., cpu; default: the first GPU."
)
@click.option("--shapes", metavar="A,B,...", help="nano, micro, smollm2-135m.")
@click.option("--jobs", type=click.IntRange(1, 1000), help="Whole jobs of a batch on one device.")
@click.option("--workers", type=click.IntRange(1, 1000), help="Processes that run whole jobs.")
@click.option("--again", is_flag=True, help="Measure the parts again that are on disk.")
@out_option("gpu", "File for the figures; finished parts are kept in a folder beside it.")
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
    return _told(
        "gpu",
        lambda: measure(parts=chosen, device=device, sizes=sizes, kept=kept, config=config),
        out,
        as_json=as_json,
    )


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


def _told(name: str, measure: Callable[[], Measured], out: Path, *, as_json: bool) -> int:
    done = measured(name, measure, out)
    if as_json:
        print_json(done.model_dump(mode="json"))
    return 0
