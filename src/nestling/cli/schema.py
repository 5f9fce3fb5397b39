"""`nestling schema`: what a recipe and a job file may hold, for editors and for people."""

from __future__ import annotations

import json
from pathlib import Path

import click

from nestling.core.rundir import write_atomic

__all__ = ["command", "schema_text"]

KINDS = ("recipe", "job")


@click.command("schema")
@click.argument("kind", type=click.Choice(KINDS))
@click.option("--markdown", is_flag=True, help="A page instead of a JSON Schema.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Default: here.")
def command(kind: str, markdown: bool, out: Path | None) -> int:
    """The keys of a recipe or of job.toml, from the models that enforce them."""
    text = _page(kind) if markdown else schema_text(kind)
    if out is None:
        click.echo(text, nl=False)
    else:
        write_atomic(out, text.encode())
        click.echo(f"wrote {out}")
    return 0


def schema_text(kind: str) -> str:
    """The JSON Schema as text, with a newline at its end."""
    from nestling.cli.config_reference import recipe_schema
    from nestling.jobs.bounds import manifest_json_schema

    schema = recipe_schema() if kind == "recipe" else manifest_json_schema()
    return json.dumps(schema, indent=2) + "\n"


def _page(kind: str) -> str:
    from nestling.cli.config_reference import recipe_reference
    from nestling.jobs.bounds import bounds_table_markdown

    return recipe_reference() if kind == "recipe" else bounds_table_markdown().rstrip() + "\n"
