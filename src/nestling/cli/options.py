"""What several commands share: options, families by name, tables, the last line of JSON."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nestling.core.errors import ConfigError

if TYPE_CHECKING:
    from nestling.config import RunConfig

__all__ = [
    "AGENT_NAMES",
    "Commands",
    "families_of",
    "families_option",
    "family_of",
    "json_option",
    "print_json",
    "print_table",
    "recipe",
    "room_options",
    "say",
    "set_option",
]

_F = TypeVar("_F", bound=Callable[..., Any])

AGENT_NAMES = (
    "noop, random, template, oracle, embedded, embedded:FOLDER with a model or a run, "
    "endpoint:URL#MODEL."
)
"""What `bench.agents.read_agent` takes, for help texts."""

json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object as the last line."
)
set_option = click.option(
    "--set", "settings", multiple=True, metavar="A.B=VALUE", help="Change one recipe setting."
)


def families_option(default: str) -> Callable[[_F], _F]:
    """`--families`, to be read with `families_of`."""
    return click.option(
        "--families", default=default, show_default=True, metavar="A,B,...",
        help="Names, or training, held_out, all.",
    )  # fmt: skip


class Commands(click.Group):
    """A group that names the nearest command on a typo."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with a hint."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            known = list(self.commands)
            raise click.UsageError(
                f"{args[0]!r} is not a command of {ctx.command_path}."
                f"{_hint(args[0], known)} Expected one of {', '.join(known)}.",
                ctx,
            )
        return super().resolve_command(ctx, args)


def room_options(function: _F) -> _F:
    """`--set` and `--unsafe-no-jail`, for commands that use a machine room."""
    unsafe = click.option(
        "--unsafe-no-jail",
        is_flag=True,
        help="Run the job's code without a jail. Only for code you trust.",
    )
    return set_option(unsafe(function))


def recipe(settings: Sequence[str], *, unsafe_no_jail: bool = False) -> RunConfig:
    """The default recipe with these `a.b=value` settings; one torch thread unless told otherwise.

    Raises:
        ConfigError: an unknown key or a value out of bounds.
    """
    from nestling.config import load_recipe

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = load_recipe(None, settings)
    if unsafe_no_jail or config.unsafe_no_jail:
        say("warning: no jail; the job's code can do whatever you can do on this machine")
        config = config.model_copy(update={"unsafe_no_jail": True})
    return config


def family_of(name: str) -> str:
    """The name, when there is such a family; `ConfigError` with the nearest one otherwise."""
    from nestling.families.registry import ALL, get, names

    if name in ALL:
        return name
    known = names()
    if name not in known:
        raise ConfigError(
            f"unknown family {name!r}; expected one of {', '.join(known)}.{_hint(name, known)}"
        )
    return get(name).name


def families_of(text: str) -> tuple[str, ...]:
    """Families out of `a,b,c`; `training`, `held_out` and `all` stand for several."""
    from nestling.families.registry import ALL, HELD_OUT, TRAINING

    several = {"training": TRAINING, "held_out": HELD_OUT, "all": ALL}
    found: list[str] = []
    for part in (one.strip() for one in text.split(",")):
        found += several.get(part) or (family_of(part),)
    return tuple(dict.fromkeys(found))


def print_json(value: Mapping[str, Any]) -> None:
    """One line; NaN and infinity, which are not JSON, would be our bug."""
    click.echo(json.dumps(value, allow_nan=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Left-aligned columns on standard output, as wide as their content, whatever the terminal."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    for row in (columns, *rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo(line.rstrip())


def say(text: str) -> None:
    """Progress, for people: standard error."""
    click.echo(text, err=True)


def _hint(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
