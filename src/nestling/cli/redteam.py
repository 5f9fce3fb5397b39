"""`nestling redteam`: attack the real machine room and say what came of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from nestling.core.clock import SystemClock

if TYPE_CHECKING:
    from nestling.redteam.case import Finding

__all__ = ["command"]


@click.command("redteam")
@click.option("--only", multiple=True, metavar="ID", help="Case id or kind; * is a wildcard.")
@click.option("--jobs", type=click.IntRange(1, 16), default=1, show_default=True,
              help="Cases at a time.")  # fmt: skip
@click.option("--list", "list_only", is_flag=True, help="Print the cases and run none.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
@click.pass_context
def command(
    context: click.Context, only: tuple[str, ...], jobs: int, *, list_only: bool, as_json: bool
) -> None:
    """Run attacks against the real jail, probe, trainer, scorer and queue.

    Exits 1 when an attack pays or escapes.
    """
    from nestling.redteam import report
    from nestling.redteam.run import run_all, select

    if list_only:
        click.echo(report.case_list_markdown(select(only)), nl=False)
        return
    clock = SystemClock()
    began_s = clock.monotonic()

    def tell(finding: Finding) -> None:
        click.echo(report.finding_line(finding), err=as_json)

    findings = run_all(only, jobs, on_finding=tell)
    seconds = clock.monotonic() - began_s
    click.echo(report.summary_line(findings, seconds), err=as_json)
    if as_json:
        click.echo(json.dumps(report.findings_json(findings, seconds)))
    if any(finding.succeeded for finding in findings):
        context.exit(1)
