"""`nestling families`: the kinds of task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from nestling.cli.options import Commands, family_of, json_option, print_json, print_table, say
from nestling.core.errors import ConfigError

__all__ = ["command"]

_F = TypeVar("_F", bound=Callable[..., Any])


def _out_option(default: str) -> Callable[[_F], _F]:
    return click.option(
        "--out", type=click.Path(path_type=Path),
        help=f"A new or empty folder. Default: {default} here.",
    )  # fmt: skip


@click.group("families", cls=Commands)
def command() -> None:
    """List, show, check, package and begin task families."""


@command.command("list")
@json_option
def list_families(as_json: bool) -> int:
    """Our six families (five train the agent, one only tests it) and those of installed packages."""
    from nestling.families.plugins import installed_names
    from nestling.families.registry import ALL, get, names

    rows, found = [], []
    broken = [
        f"the plug-in {name!r} is left out: the name is one of ours; rename it"
        for name in installed_names()
        if name in ALL
    ]
    for name in names():
        try:
            one = get(name)
        except ConfigError as e:
            broken.append(str(e))
            continue
        use = "held out" if one.held_out else "training"
        source = "nestling" if name in ALL else "plug-in"
        lo, hi = one.eval_range
        rows.append((name, use, source, f"{lo} to {hi}", one.tool_signatures))
        found.append(
            {
                "name": name,
                "held_out": one.held_out,
                "source": source,
                "eval_range": [lo, hi],
                "tools": one.tool_signatures,
            }
        )
    print_table(("family", "use", "from", "hidden difficulty", "tools"), rows)
    for line in broken:
        say(f"error: {line}")
    if as_json:
        print_json({"families": found, "broken": broken})
    return 1 if broken else 0


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
@_out_option("nestling-NAME")
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


@command.command("new")
@click.argument("name")
@_out_option("NAME-family")
@json_option
def new(name: str, out: Path | None, as_json: bool) -> int:
    """Begin a family of your own: an installable package whose tests pass as it stands."""
    from nestling.families.scaffold import write_new_family

    folder = out or Path(f"{name.replace('_', '-')}-family")
    files = write_new_family(name, folder)
    click.echo(f"{len(files)} files in {folder}; begin with {folder}/README.md")
    click.echo(f"install it with: pip install -e {folder}")
    click.echo(f"then: nestling families check {name}")
    if as_json:
        print_json({"folder": str(folder), "files": [str(path) for path in files]})
    return 0


@command.command("check")
@click.argument("name")
@json_option
def check(name: str, as_json: bool) -> int:
    """Draw items of a family, solve, spoil and grade them, and compare its toolset."""
    from nestling.families.contract import play_problems, toolset_problems
    from nestling.families.registry import get

    family = get(family_of(name))
    problems = [*play_problems(family), *toolset_problems(family)]
    for problem in problems:
        click.echo(problem)
    if not problems:
        click.echo(f"{name} keeps the contract of a family")
    if as_json:
        print_json({"ok": not problems, "problems": problems})
    return 1 if problems else 0
