"""`nestling best-job`: is there one job that is best everywhere, or does it depend on the family?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from nestling.cli.bench import measured
from nestling.cli.options import (
    families_of,
    families_option,
    json_option,
    print_json,
    print_table,
    say,
)

if TYPE_CHECKING:
    from nestling.agent.reward import RewardKind
    from nestling.bench.record import BenchRecord

__all__ = ["command"]


@click.command("best-job")
@click.argument(
    "data",
    nargs=-1,
    required=True,
    metavar="FILE...",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
)
@families_option("training")
@click.option("--reward", type=click.Choice(["seed", "paired"]), default="seed", show_default=True,
              help="By which reward jobs are paid.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True,
              help="Of the noise by which evidence is split.")  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False),
    default=Path("results") / "calibration" / "best-job.json", show_default=True,
    help="File for the figures; the tables go beside it as .md.",
)  # fmt: skip
@json_option
def command(
    data: tuple[Path, ...], families: str, reward: str, seed: int, out: Path, as_json: bool
) -> int:
    """The best fixed job against the best job of each family, from measured jobs.

    FILE is job-response data, such as results/calibration/job-response.jsonl.gz, or what
    `nestling bench spread` writes. Nothing is trained.
    """
    from nestling.bench.best_job import CHOICE_COLUMNS, choice_rows, measure, verdict

    names = families_of(families)
    kind = cast("RewardKind", reward)
    record = measured("best-job", lambda: measure(data, families=names, kind=kind, seed=seed), out)
    click.echo("")
    print_table(CHOICE_COLUMNS, choice_rows(record.figures))
    click.echo("")
    click.echo(verdict(record.figures))
    _write_page(record, out.with_suffix(".md"))
    if as_json:
        print_json(record.model_dump(mode="json"))
    return 0


def _write_page(record: BenchRecord, path: Path) -> None:
    from nestling.bench.best_job import page
    from nestling.core.rundir import write_atomic

    write_atomic(path, page(record).encode())
    say(f"wrote {path}")
