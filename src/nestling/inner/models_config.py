"""Which base models a recipe offers, and the bounds that go with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import Field, model_validator

from nestling.core.errors import ConfigError
from nestling.core.frozen import Frozen
from nestling.families import bases
from nestling.families.bases import BaseModel
from nestling.families.open_models import base_of_folder, fetched_folder, open_models
from nestling.jobs.bounds import LARGE, OPEN, SMALL, Bounds

__all__ = ["ExtraModel", "ModelsConfig", "bounds_of", "offered_bases"]


class ExtraModel(Frozen):
    """A base model beside the shipped ones."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    """What jobs call it in `base_model`."""
    folder: str = ""
    """A Hugging Face model folder (Llama, Qwen2, Qwen3 or Gemma 3); empty: the model of that name
    that `nestling models fetch` brought."""


class ModelsConfig(Frozen):
    """Base models that jobs may choose."""

    shipped: bool = True
    """Offer the models of the package. With open models beside them, their bounds are the open ones."""
    extra: tuple[ExtraModel, ...] = ()
    """Base models of the hub that jobs may choose too."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """Where jobs are trained and scored when each has a process of its own."""

    @model_validator(mode="after")
    def _check_names(self) -> ModelsConfig:
        names = [one.name for one in self.extra]
        if len(set(names)) != len(names):
            raise ValueError("two models of models.extra have one name; rename one")
        if not self.shipped and not names:
            raise ValueError(
                "no base model is left: add some to models.extra or set shipped = true"
            )
        return self


def offered_bases(config: ModelsConfig, state: Path) -> Mapping[str, BaseModel]:
    """Every base model on offer by name, smallest shipped one first, then those of `extra`.

    Raises:
        ConfigError: a name is taken, or a model was not fetched.
        ModelError: a folder is missing or damaged.
    """
    found = {name: bases.get(name) for name in bases.names()} if config.shipped else {}
    for one in config.extra:
        if one.name in bases.names():
            raise ConfigError(
                f"models.extra has {one.name!r}, the name of a shipped model; choose another name"
            )
        folder = Path(one.folder) if one.folder else fetched_folder(state, one.name)
        if not folder.is_dir():
            raise ConfigError(f"base model {one.name!r}: {_missing(one, folder)}")
        found[one.name] = base_of_folder(one.name, folder.resolve())
    return found


def bounds_of(config: ModelsConfig, trainer: str = "embedded") -> Bounds:
    """The enforced table of job settings: prime-rl's, that of small models, or the open one; with these names."""
    if trainer != "prime_rl" and not config.extra:
        return SMALL
    shipped = bases.names() if config.shipped else ()
    names = (*shipped, *(one.name for one in config.extra))
    return replace(LARGE if trainer == "prime_rl" else OPEN, base_models=names)


def _missing(one: ExtraModel, folder: Path) -> str:
    if one.folder:
        return f"{folder} is not a folder; expected a Hugging Face model folder; check models.extra"
    if one.name in open_models():
        return f"it was not fetched yet; run: nestling models fetch {one.name}"
    return (
        f"nothing of that name can be fetched (there is {', '.join(sorted(open_models()))}); "
        "give its folder in models.extra"
    )
