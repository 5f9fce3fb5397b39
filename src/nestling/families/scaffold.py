"""A new family to begin from: an installable package whose tests pass as it stands."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Final

from nestling import __version__
from nestling.core.errors import ConfigError
from nestling.core.rundir import write_atomic
from nestling.families.registry import ALL

__all__ = ["new_family_files", "write_new_family"]

_TEMPLATES: Final = Path(__file__).parent / "new_family"
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_TAKEN: Final = (*ALL, "answer", "item", "rollout", "steps")
_FILES: Final = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "{module}/__init__.py": "__init__.py",
    "{module}/family.py": "family.py",
    "{module}/public/__init__.py": "public__init__.py",
    "{module}/public/item.py": "public_item.py",
    "{module}/public/rollout.py": "public_rollout.py",
    "{module}/public/steps.py": "public_steps.py",
    "{module}/public/{name}.py": "public_rules.py",
    "{module}/public/{name}_tools.py": "public_tools.py",
    "tests/test_{name}.py": "test.py",
}


def new_family_files(name: str) -> dict[str, bytes]:
    """Path to content of a package `NAME_family` with a small working family.

    Raises:
        ConfigError: the name cannot be a family's, or is taken.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a family; expected lower-case letters, digits and "
            f"single underscores, as in coin_count; choose another name"
        )
    if name in _TAKEN:
        raise ConfigError(
            f"the name {name!r} is taken by Nestling itself; expected a new one; choose another name"
        )
    fields = {
        "name": name,
        "dashed": name.replace("_", "-"),
        "module": f"{name}_family",
        "Class": "".join(part.capitalize() for part in name.split("_")),
        "version": __version__,
    }
    return {path.format(**fields): _filled(source, fields) for path, source in _FILES.items()}


def write_new_family(name: str, folder: Path) -> list[Path]:
    """Write the package into a folder that is new or empty; returns its files.

    Raises:
        ConfigError: a bad name, or the folder holds something.
        StoreError: it cannot be written.
    """
    files = new_family_files(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} is not empty; expected a new folder for the package; name another one with --out"
        )
    for path, data in files.items():
        write_atomic(folder / path, data)
    return [folder / path for path in files]


def _filled(source: str, fields: dict[str, str]) -> bytes:
    text = (_TEMPLATES / f"{source}.txt").read_text("utf-8")
    for key, value in fields.items():
        text = text.replace("{{" + key + "}}", value)
    return text.encode()
