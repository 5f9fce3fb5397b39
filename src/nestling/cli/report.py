"""`nestling report`: one HTML file for a run, finished or not, or for several side by side."""

from __future__ import annotations

from pathlib import Path

import click

from nestling.cli.options import json_option, print_json
from nestling.core.errors import ConfigError

__all__ = ["command"]


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page; its figures and tables are written beside it. Default: RUN/report/index.html, "
    "for several runs comparison/index.html.",
)
@click.option("--png", is_flag=True, help="Write the figures as PNG too, beside SVG and CSV.")
@click.option(
    "--export",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write no page but the run's numbers to this folder, small enough for a repository; it "
    "may stand for the run wherever this command reads one.",
)
@click.option(
    "--effect",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.05,
    show_default=True,
    help="Difference in mean reward for which the report says how many episodes and hidden items "
    "would find it.",
)
@click.option(
    "--redraw",
    is_flag=True,
    help="RUN is a folder of committed results, as `results` of the repository: redraw all its "
    "figures and tables and its README.md from the data in it.",
)
@json_option
def command(
    runs: tuple[Path, ...],
    out: Path | None,
    png: bool,
    export: Path | None,
    effect: float,
    redraw: bool,
    as_json: bool,
) -> int:
    """Write the static HTML report of a run folder, or the comparison of several.

    The runs may still be going on. A folder of exported data stands for its run.
    """
    from nestling.report.arc_data import is_arc_data

    if redraw:
        return _redraw(runs, as_json)
    for run in runs:
        if not (run / "run.db").is_file() and not is_arc_data(run):
            what = "holds no run (no run.db)" if run.is_dir() else "is not a folder"
            raise ConfigError(
                f"{run} {what}; expected the folder of `nestling run` or `nestling eval-agent`; "
                f"check the path"
            )
    if export is not None:
        return _export(runs, export, as_json)
    if len(runs) > 1:
        from nestling.report.compare_page import write_comparison

        page = write_comparison(runs, out or Path("comparison") / "index.html", png=png)
        table = page.parent / "runs.csv"
        click.echo(str(page))
        if as_json:
            print_json({"report": str(page), "runs": str(table)})
        return 0
    from nestling.report.page import write_report

    page = write_report(runs[0], out, png=png, effect=effect)
    click.echo(str(page))
    if as_json:
        print_json({"report": str(page), "summary": str(page.parent / "summary.json")})
    return 0


def _export(runs: tuple[Path, ...], folder: Path, as_json: bool) -> int:
    from nestling.report.arc_data import write_arc_data
    from nestling.report.gather import read_records

    if len(runs) > 1:
        raise ConfigError(
            f"--export takes one run, not {len(runs)}; export each to a folder of its own"
        )
    files = write_arc_data(read_records(runs[0]), folder)
    for file in files:
        click.echo(str(file))
    if as_json:
        print_json({"files": [str(file) for file in files]})
    return 0


def _redraw(folders: tuple[Path, ...], as_json: bool) -> int:
    from nestling.report.published import redraw

    for folder in folders:
        page = redraw(folder)
        click.echo(str(page))
    if as_json:
        print_json({"pages": [str(folder / "README.md") for folder in folders]})
    return 0
