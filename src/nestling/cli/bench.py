"""`nestling bench`: measurements, each with the machine and the versions it belongs to."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nestling.bench.registry import BENCHMARKS, measure_of
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


def _usual_options(name: str, out_help: str = "File for the figures.") -> Callable[[_F], _F]:
    """`--out`, `--json`, and what the table says of the benchmark."""
    benchmark = BENCHMARKS[name]

    def add(function: _F) -> _F:
        function = out_option(name, out_help)(json_option(function))
        if benchmark.has_room:
            function = room_options(function)
        if benchmark.has_runs:
            function = _runs(function)
        if benchmark.families:
            function = families_option(benchmark.families)(function)
        return function

    return add


@click.group("bench", cls=Commands)
def command() -> None:
    """Measure jobs and this machine."""


@command.command("list")
def list_benchmarks() -> int:
    """Names and what they measure."""
    print_table(
        ("benchmark", "measures"), [(name, one.measures) for name, one in BENCHMARKS.items()]
    )
    return 0


@command.command("spread")
@_usual_options("spread")
@click.option("--seeds", type=click.IntRange(1, 100), default=3, show_default=True,
              help="Training seeds of each job.")  # fmt: skip
@click.option("--items", type=click.IntRange(8, 10_000), help="Hidden items per score.")
@click.option("--jobs", metavar="A,B,...", help="Some of the reference jobs only.")
@click.option(
    "--workers", type=click.IntRange(1, 1024), metavar="N",
    help="Jobs measured at the same time; default: one per core.",
)  # fmt: skip
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
    changes = [*settings, *([f"inner.eval_items={items}"] if items is not None else [])]
    arguments: dict[str, Any] = {
        "families": families_of(families),
        "config": recipe(changes, unsafe_no_jail=unsafe_no_jail),
        "seeds": seeds,
        "workers": workers or len(os.sched_getaffinity(0)),
    }
    if jobs:
        arguments["jobs"] = tuple(part.strip() for part in jobs.split(","))
    return _told("spread", arguments, out, as_json=as_json)


@command.command("gpu")
@_usual_options("gpu", "File for the figures; finished parts are kept in a folder beside it.")
@click.option("--parts", metavar="A,B,...", help="See `--list`; default: all but devices.")
@click.option("--list", "list_parts", is_flag=True, help="Names of the parts, and end.")
@click.option(
    "--device", default="", metavar="NAME", help="cuda:0, ..., cpu; default: the first GPU."
)
@click.option("--shapes", metavar="A,B,...", help="nano, micro, smollm2-135m.")
@click.option("--jobs", type=click.IntRange(1, 1000), help="Whole jobs of a batch on one device.")
@click.option("--workers", type=click.IntRange(1, 1000), help="Processes that run whole jobs.")
@click.option("--again", is_flag=True, help="Measure the parts again that are on disk.")
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
    from nestling.bench.gpu import PARTS, default_sizes

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
    arguments = {"parts": chosen, "device": device, "sizes": sizes, "kept": kept, "config": config}
    return _told("gpu", arguments, out, as_json=as_json)


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
    records = {}
    for name, benchmark in BENCHMARKS.items():
        say(f"{name}: {benchmark.measures}")
        records[name] = _measured_with(name, {}, out / f"{name}.json")
    if as_json:
        print_json({name: one.model_dump(mode="json") for name, one in records.items()})
    return 0


def measured(name: str, measure: Callable[[], Measured], out: Path) -> BenchRecord:
    """Measure with one torch thread unless told otherwise, print the table, write the record."""
    from nestling.bench.record import record
    from nestling.core.clock import SystemClock
    from nestling.core.rundir import write_atomic

    os.environ.setdefault("OMP_NUM_THREADS", "1")
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


def _told(name: str, arguments: Mapping[str, Any], out: Path, *, as_json: bool) -> int:
    done = _measured_with(name, arguments, out)
    if as_json:
        print_json(done.model_dump(mode="json"))
    return 0


def _measured_with(name: str, arguments: Mapping[str, Any], out: Path) -> BenchRecord:
    return measured(name, lambda: measure_of(name)(**arguments), out)


def _plain_command(name: str) -> click.Command:
    """The command of a benchmark that has the usual options only."""
    benchmark = BENCHMARKS[name]

    def body(
        out: Path,
        *,
        as_json: bool,
        families: str = "",
        settings: tuple[str, ...] = (),
        unsafe_no_jail: bool = False,
        **arguments: Any,  # noqa: ANN401
    ) -> int:
        if benchmark.families:
            arguments["families"] = families_of(families)
        if benchmark.has_room:
            arguments["config"] = recipe(settings, unsafe_no_jail=unsafe_no_jail)
        return _told(name, arguments, out, as_json=as_json)

    measures = benchmark.measures
    told = click.command(name, help=f"{measures[0].upper()}{measures[1:]}.")
    return told(_usual_options(name)(body))


for _name in BENCHMARKS.keys() - command.commands.keys():
    command.add_command(_plain_command(_name))
