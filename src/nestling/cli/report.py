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
@json_option
def command(runs: tuple[Path, ...], out: Path | None, png: bool, as_json: bool) -> int:
    """Write the static HTML report of a run folder, or the comparison of several.

    The runs may still be going on.
    """
    for run in runs:
        if not (run / "run.db").is_file():
            what = "holds no run (no run.db)" if run.is_dir() else "is not a folder"
            raise ConfigError(
                f"{run} {what}; expected the folder of `nestling run` or `nestling eval-agent`; "
                f"check the path"
            )
    if len(runs) > 1:
        from nestling.report.compare_page import write_comparison

        page = write_comparison(runs, out or Path("comparison") / "index.html", png=png)
        table = page.parent / "runs.csv"
        click.echo(str(page))
        if as_json:
            print_json({"report": str(page), "runs": str(table)})
        return 0
    from nestling.report.page import write_report

    page = write_report(runs[0], out, png=png)
    click.echo(str(page))
    if as_json:
        print_json({"report": str(page), "summary": str(page.parent / "summary.json")})
    return 0
