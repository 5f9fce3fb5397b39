"""Families of installed packages: found by an entry point, checked, then used like our own.

A package declares `[project.entry-points."nestling.families"]` with a line `NAME = "module:FAMILY"`.
Loading imports the package, so it is the user's own trusted code, like every installed package; of
its files only the public modules ever reach a workspace or a jail. Nothing is imported until a
family of that name is asked for.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final, cast

from nestling.core.errors import ConfigError
from nestling.families.contract import shape_problems
from nestling.families.family import Family

__all__ = ["GROUP", "installed_names", "load"]

GROUP: Final = "nestling.families"
"""The entry-point group; the name of an entry is the name of its family."""


def installed_names() -> tuple[str, ...]:
    """Names that installed packages declare, sorted; imports none of them."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


@cache
def load(name: str) -> Family:
    """The family that an installed package declares under this name.

    Raises:
        ConfigError: none does, two do, its import fails, or what it names is no family.
    """
    found = list(entry_points(group=GROUP, name=name))
    if len(found) != 1:
        owners = ", ".join(_owner(entry) for entry in found) or "no installed package"
        raise ConfigError(
            f"family {name!r} is declared by {owners}; expected one package; "
            f"uninstall all but one, or rename its family"
        )
    entry = found[0]
    try:
        family = entry.load()
    except Exception as e:
        raise ConfigError(
            f"family {name!r} of {_owner(entry)} cannot be imported: {type(e).__name__}: {e}; "
            f"expected {entry.value} to be importable; mend the package and install it again"
        ) from e
    problems = shape_problems(family, name)
    if problems:
        raise ConfigError(
            f"family {name!r} of {_owner(entry)} cannot be used: {'; '.join(problems)}; "
            f"compare with a fresh one: nestling families new {name} --out FOLDER"
        )
    return cast("Family", family)


def _owner(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
