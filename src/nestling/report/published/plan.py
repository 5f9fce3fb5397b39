"""What the folder of results is meant to hold: `arc/arcs.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from nestling.core.errors import ConfigError
from nestling.core.frozen import Frozen

__all__ = ["ArcPlan", "Expected", "Published", "ResultsPlan", "read_plan"]


class Published(Frozen):
    """The experiment that ours is put beside, as its author reported it."""

    about: str
    """One sentence: what it was, and what its figures are."""
    figures: dict[str, str]
    """Text by quantity; a quantity that is missing was not reported."""
    best_pre: dict[str, float]
    """Untrained score by family."""


class ArcPlan(Frozen):
    """One run that is to be published; its data is in `arc/NAME/run`."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    title: str
    recipe: str
    kind: Literal["arc", "leave_out", "agent"]
    """arc: a seed of the main experiment; leave_out: other held-out families; agent: another agent."""


class Expected(Frozen):
    """A result that is a file of its own."""

    file: str
    """In the folder of results."""
    what: str


class ResultsPlan(Frozen):
    """The whole file."""

    published: Published
    arcs: tuple[ArcPlan, ...]
    expected: tuple[Expected, ...] = ()


def read_plan(path: Path) -> ResultsPlan:
    """The plan; raises `ConfigError` when it is missing or not as it should be."""
    try:
        return ResultsPlan.model_validate(tomllib.loads(path.read_text("utf-8")))
    except (OSError, ValueError) as error:
        detail = error.errors()[0] if isinstance(error, ValidationError) else error
        raise ConfigError(
            f"{path} cannot be read: {detail}; expected the plan of a folder of results, as in "
            f"results/arc/arcs.toml of the repository; name a folder that has one"
        ) from error
