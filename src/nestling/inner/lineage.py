"""Is this weight file a trained copy of the pinned base? Decided on bytes, before any is loaded.

Only the safetensors format is read: a JSON header and raw numbers, nothing that can run code.
The caller works on with the bytes that were checked, not with the file, which may change.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import Field, ValidationError

from nestling.core.errors import ModelError
from nestling.core.frozen import Frozen

__all__ = ["WEIGHTS_FILE", "TensorSpec", "check_weights", "read_weights_file", "tensor_specs"]

WEIGHTS_FILE: Final = "model.safetensors"

_MAX_HEADER_BYTES: Final = 8 * 1024 * 1024
_BYTES_PER_NUMBER: Final = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What the header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the end of the header."""
    end: int


_Offset = Annotated[int, Field(strict=True, ge=0)]


class _HeaderEntry(Frozen):
    """One tensor as the format describes it."""

    dtype: Literal["F32", "F16", "BF16"]
    shape: tuple[Annotated[int, Field(strict=True, ge=0, lt=2**40)], ...] = Field(max_length=8)
    data_offsets: tuple[_Offset, _Offset]


def read_weights_file(folder: Path, *, max_bytes: int, name: str = WEIGHTS_FILE) -> bytes:
    """The bytes of a folder's weight file.

    Raises:
        ModelError: no such file, a link, not a plain file, or larger than `max_bytes`.
    """
    path = folder / name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be opened ({error.strerror}); expected a plain file of weights in the "
            "safetensors format; save the model again"
        ) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):  # before it is wrapped: Python refuses to wrap a folder
        os.close(descriptor)
        raise ModelError(f"{path} is not a plain file; save the model again")
    with os.fdopen(descriptor, "rb") as file:
        if status.st_size > max_bytes:
            raise ModelError(
                f"{path} has {status.st_size} bytes, more than the {max_bytes} that weights of "
                "this base can need; save only the weights"
            )
        return file.read(max_bytes + 1)[: max_bytes + 1]


def tensor_specs(weights: bytes) -> dict[str, TensorSpec]:
    """Name to dtype, shape and place of every tensor; the data must fill the file exactly.

    Raises:
        ModelError: the bytes are not a well-formed safetensors file.
    """
    if len(weights) < 8:
        raise ModelError("weights are not in the safetensors format: shorter than their header")
    header_len = int.from_bytes(weights[:8], "little")
    if header_len > min(_MAX_HEADER_BYTES, len(weights) - 8):
        raise ModelError(
            "weights are not in the safetensors format: the header does not fit "
            "(pickled checkpoints are never read)"
        )
    try:
        header = json.loads(weights[8 : 8 + header_len], object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelError("weights are not in the safetensors format: broken header") from error
    if not isinstance(header, dict):
        raise ModelError("weights are not in the safetensors format: the header is not an object")
    specs = {
        name: _tensor_spec(name, entry) for name, entry in header.items() if name != "__metadata__"
    }
    position = 0
    for name, spec in sorted(specs.items(), key=lambda named: named[1].begin):
        if spec.begin != position:
            raise ModelError(f"tensor {name!r} overlaps another one or leaves a gap")
        position = spec.end
    if position != len(weights) - 8 - header_len:
        raise ModelError("the weight file holds bytes that belong to no tensor")
    return specs


def check_weights(weights: bytes, pinned: Mapping[str, TensorSpec]) -> None:
    """Passes when names, shapes and dtypes match the base and every number is finite.

    Trained weights may be stored in float32 whatever the base is stored in.

    Raises:
        ModelError: says which tensor differs and how.
    """
    specs = tensor_specs(weights)
    missing, extra = sorted(pinned.keys() - specs.keys()), sorted(specs.keys() - pinned.keys())
    if missing or extra:
        raise ModelError(
            f"tensor names differ from the base: {_some(missing)} missing, {_some(extra)} added; "
            "expected exactly the tensors of the base"
        )
    data_start = 8 + int.from_bytes(weights[:8], "little")
    for name, spec in specs.items():
        base = pinned[name]
        if spec.shape != base.shape:
            raise ModelError(f"tensor {name!r} has shape {spec.shape}, the base has {base.shape}")
        if spec.dtype not in (base.dtype, "F32"):
            raise ModelError(f"tensor {name!r} is {spec.dtype}, expected {base.dtype} or F32")
        if not _all_finite(weights[data_start + spec.begin : data_start + spec.end], spec.dtype):
            raise ModelError(f"tensor {name!r} holds numbers that are not finite")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Of a name given twice, another reader may take the other one."""
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


def _tensor_spec(name: str, entry: object) -> TensorSpec:
    try:
        header = _HeaderEntry.model_validate(entry)
    except ValidationError as error:
        raise ModelError(
            f"tensor {name[:80]!r} has a broken header entry; expected dtype "
            f"{'/'.join(_BYTES_PER_NUMBER)}, shape and data_offsets"
        ) from error
    begin, end = header.data_offsets
    expected_bytes = math.prod(header.shape) * _BYTES_PER_NUMBER[header.dtype]
    if end - begin != expected_bytes:
        raise ModelError(f"tensor {name[:80]!r} has {end - begin} bytes, not {expected_bytes}")
    return TensorSpec(dtype=header.dtype, shape=header.shape, begin=begin, end=end)


def _all_finite(data: bytes, dtype: str) -> bool:
    if dtype == "BF16":
        # The upper half of a float32: an exponent of all ones means infinity or NaN.
        bits = np.frombuffer(data, dtype="<u2")
        return bool(((bits & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(np.frombuffer(data, dtype="<f4" if dtype == "F32" else "<f2")).all())


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name[:80]) for name in names[:3])
    return "none" if not names else shown + (f" and {len(names) - 3} more" if names[3:] else "")
