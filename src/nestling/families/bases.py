"""The catalog of base models that ship with the package."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError

from nestling.core.errors import ModelError
from nestling.core.frozen import Frozen

__all__ = [
    "WEIGHTS_FOLDER",
    "BaseModel",
    "CatalogEntry",
    "get",
    "names",
    "read_catalog",
    "write_catalog",
]

WEIGHTS_FOLDER: Final = Path(__file__).parent / "weights"
"""One folder per base model, in the Hugging Face layout, and `catalog.json`."""

_CATALOG: Final = "catalog.json"
_BUILD_LINE: Final = "run `nestling models build`, or reinstall the package"


class CatalogEntry(Frozen):
    """What the catalog file says of one model."""

    params: int = Field(gt=0)
    licence: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Of `model.safetensors`."""


class _Catalog(Frozen):
    """The catalog file."""

    version: Literal[1] = 1
    models: dict[str, CatalogEntry]


class BaseModel(Frozen):
    """A base model on disk."""

    name: str
    params: int
    """Trainable numbers, the tied embedding counted once."""
    folder: Path
    licence: str
    sha256: str

    def verify(self) -> None:
        """Compare the weights with the catalog.

        Raises:
            ModelError: the file differs from what was built.
        """
        path = self.folder / "model.safetensors"
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != self.sha256:
            raise ModelError(
                f"{path} has SHA-256 {found[:12]}...; expected {self.sha256[:12]}...; {_BUILD_LINE}"
            )


def names(weights_folder: Path = WEIGHTS_FOLDER) -> tuple[str, ...]:
    """Names of all base models in the catalog, smallest first.

    Raises:
        ModelError: there is no catalog, or it is damaged.
    """
    models = read_catalog(weights_folder)
    return tuple(sorted(models, key=lambda name: (models[name].params, name)))


def get(name: str, weights_folder: Path = WEIGHTS_FOLDER) -> BaseModel:
    """The base model of that name.

    Raises:
        ModelError: it is not in the catalog, or its folder is missing.
    """
    models = read_catalog(weights_folder)
    if name not in models:
        raise ModelError(
            f"no base model {name!r}; expected one of {', '.join(sorted(models))}; check the spelling"
        )
    folder = weights_folder / name
    if not (folder / "model.safetensors").is_file():
        raise ModelError(
            f"{folder} has no model.safetensors; expected a built base model; {_BUILD_LINE}"
        )
    return BaseModel(name=name, folder=folder, **models[name].model_dump())


def read_catalog(weights_folder: Path) -> dict[str, CatalogEntry]:
    """All entries of a catalog file.

    Raises:
        ModelError: there is none, or it is damaged.
    """
    path = weights_folder / _CATALOG
    try:
        return _Catalog.model_validate_json(path.read_bytes()).models
    except (OSError, ValidationError) as e:
        raise ModelError(
            f"cannot read {path}: {e}; expected the catalog of base models; {_BUILD_LINE}"
        ) from e


def write_catalog(weights_folder: Path, name: str, *, params: int, licence: str) -> CatalogEntry:
    """Enter a freshly built model; other entries stay."""
    path = weights_folder / _CATALOG
    models = dict(read_catalog(weights_folder)) if path.exists() else {}
    digest = hashlib.sha256((weights_folder / name / "model.safetensors").read_bytes()).hexdigest()
    models[name] = CatalogEntry(params=params, licence=licence, sha256=digest)
    catalog = _Catalog(models=dict(sorted(models.items())))
    path.write_text(catalog.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return models[name]
