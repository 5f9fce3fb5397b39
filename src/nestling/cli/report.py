"""`nestling report`: one HTML file for a run, finished or not."""

from __future__ import annotations

from pathlib import Path

import click

from nestling.cli.options import json_option, print_json
from nestling.core.errors import ConfigError

__all__ = ["command"]


@click.command("report")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page; its figures and tables are written beside it. Default: RUN/report/index.html.",
)
@json_option
def command(run: Path, out: Path | None, as_json: bool) -> int:
    """Write the static HTML report of the run folder RUN; the run may still be going on."""
    if not (run / "run.db").is_file():
        what = "holds no run (no run.db)" if run.is_dir() else "is not a folder"
        raise ConfigError(
            f"{run} {what}; expected the folder of `nestling run` or `nestling eval-agent`; "
            f"check the path"
        )
    from nestling.report.page import write_report

    page = write_report(run, out)
    click.echo(str(page))
    if as_json:
        print_json({"report": str(page), "summary": str(page.parent / "summary.json")})
    return 0
