"""The recipes that come with the package."""

from __future__ import annotations

from pathlib import Path

from nestling.core.errors import ConfigError

__all__ = ["recipe_names", "recipe_text"]


def _folder() -> Path:
    """Inside an installed package, beside `src` in a checkout."""
    installed = Path(__file__).parents[1] / "recipe_files"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "recipes"


def recipe_names() -> tuple[str, ...]:
    """For example `quick` and `laptop`, sorted."""
    return tuple(sorted(path.stem for path in _folder().glob("*.toml")))


def recipe_text(name: str) -> str:
    """The file as text.

    Raises:
        ConfigError: there is no such recipe.
    """
    known = recipe_names()
    if name not in known:
        raise ConfigError(f"no recipe {name!r}; expected one of {', '.join(known)}")
    return (_folder() / f"{name}.toml").read_text("utf-8")
