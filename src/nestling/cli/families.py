"""`nestling families`: the kinds of task."""

from __future__ import annotations

from pathlib import Path

import click

from nestling.cli.options import Commands, family_of, json_option, print_json, print_table

__all__ = ["command"]


@click.group("families", cls=Commands)
def command() -> None:
    """List and show the task families."""


@command.command("list")
@json_option
def list_families(as_json: bool) -> int:
    """All families: five train the agent, the others only test it."""
    from nestling.families.registry import ALL, get

    found = [get(name) for name in ALL]
    rows = [
        (
            one.name,
            "held out" if one.held_out else "training",
            f"{one.eval_range[0]} to {one.eval_range[1]}",
            one.tool_signatures,
        )
        for one in found
    ]
    print_table(("family", "use", "hidden difficulty", "tools"), rows)
    if as_json:
        print_json(
            {
                "families": [
                    {
                        "name": one.name,
                        "held_out": one.held_out,
                        "eval_range": list(one.eval_range),
                        "tools": one.tool_signatures,
                    }
                    for one in found
                ]
            }
        )
    return 0


@command.command("show")
@click.argument("name")
@click.option(
    "--examples", "num_examples", type=click.IntRange(0, 64), default=2, show_default=True,
    help="Public example tasks to print.",
)  # fmt: skip
@json_option
def show(name: str, num_examples: int, as_json: bool) -> int:
    """What a family asks, its tools, and example tasks with their answers."""
    from nestling.families.registry import get
    from nestling.families.splits import dev_items

    family = get(family_of(name))
    items = dev_items(family, num_examples) if num_examples else []
    lo, hi = family.eval_range
    click.echo(f"{family.name} ({'held out' if family.held_out else 'training'})")
    click.echo("")
    click.echo(family.spec.strip())
    click.echo("")
    click.echo(f"tools: {family.tool_signatures}")
    click.echo(f"difficulty: 1 to {family.highest}; hidden tasks {lo} to {hi}")
    for number, item in enumerate(items, start=1):
        click.echo("")
        click.echo(f"example {number}: {item.prompt}")
        click.echo(f"answer: {item.answer} ({item.num_calls} calls)")
    if as_json:
        print_json(
            {
                "name": family.name,
                "held_out": family.held_out,
                "spec": family.spec,
                "tools": family.tool_signatures,
                "eval_range": [lo, hi],
                "highest": family.highest,
                "examples": [
                    {"prompt": item.prompt, "answer": item.answer, "num_calls": item.num_calls}
                    for item in items
                ],
            }
        )
    return 0


@command.command("package")
@click.argument("name")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="A new or empty folder. Default: nestling-NAME here.",
)
@json_option
def package(name: str, out: Path | None, as_json: bool) -> int:
    """Write a family as an installable verifiers package.

    verifiers, prime-rl and whatever else reads verifiers tasksets can then use it; it needs nothing
    of Nestling.
    """
    from nestling.families.registry import get
    from nestling.families.verifiers_package import write_verifiers_package

    family = get(family_of(name))
    folder = out or Path(f"nestling-{family.name.replace('_', '-')}")
    files = write_verifiers_package(family, folder)
    click.echo(f"{len(files)} files in {folder}; install it with: pip install {folder}")
    if as_json:
        print_json({"folder": str(folder), "files": [str(path) for path in files]})
    return 0
