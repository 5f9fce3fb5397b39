"""`nestling init`: a folder to begin in, with a recipe, schemas for editors and an example job."""

from __future__ import annotations

from pathlib import Path

import click

from nestling.cli.options import json_option, print_json
from nestling.cli.schema import KINDS, schema_text
from nestling.core.errors import ConfigError
from nestling.core.rundir import write_atomic

__all__ = ["command"]

_README = """# {name}

- `recipe.toml`: what is run; every key is explained by `nestling schema recipe --markdown`.
- `job/`: the training job that an agent starts from, filled in by hand: `job.toml` and a verifiers package.
- `*.schema.json`: for editors that check TOML files.

```sh
nestling doctor                        # what is installed, what is missing
nestling job run job --family ledger   # one job: train a small model, score it
nestling run recipe.toml --dry-run     # the plan and its ceiling
nestling run recipe.toml               # the nested loop; the same command continues
nestling dash runs                     # watch it
```
"""


@click.command("init")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=".")
@click.option("--recipe", "name", default="quick", show_default=True, help="Which one to copy.")
@json_option
def command(folder: Path, name: str, as_json: bool) -> int:
    """Write a recipe, an example job and editor schemas into FOLDER; overwrites nothing."""
    from nestling.cli.recipes import recipe_text
    from nestling.jobs.template import template_job

    title = folder.resolve().name
    files = {
        "recipe.toml": f"#:schema ./recipe.schema.json\n{recipe_text(name)}".encode(),
        "README.md": _README.format(name=title).encode(),
        ".gitignore": b"runs/\n",
        **{f"{kind}.schema.json": schema_text(kind).encode() for kind in KINDS},
    }
    job = template_job("ledger").files
    files |= {f"job/{path}": data for path, data in job.items()}
    files["job/job.toml"] = b"#:schema ../job.schema.json\n" + files["job/job.toml"]
    taken = [path for path in files if (folder / path).exists()]
    if taken:
        raise ConfigError(
            f"{folder} already holds {', '.join(taken)}; expected a new folder; name another one, "
            f"as in: nestling init my-run"
        )
    for path, data in files.items():
        write_atomic(folder / path, data)
    run = "recipe.toml" if folder == Path() else f"{folder}/recipe.toml"
    click.echo(f"{len(files)} files in {folder}; begin with: nestling run {run} --dry-run")
    if as_json:
        print_json({"folder": str(folder), "files": sorted(files)})
    return 0
