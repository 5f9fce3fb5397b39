"""One folder per saved learner: a Hugging Face model (or a PEFT adapter), optimiser, version.

`<name>/model.safetensors` ... (or `<name>/adapter/`), `<name>/optimizer.safetensors`, `<name>/state.json`.
A folder appears by one rename, after everything in it is on disk. One that is replaced is called `.old-<name>` for a
moment; a crash in it is made good when the state is read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nestling.core.errors import LearnerError, ModelError
from nestling.core.frozen import Frozen
from nestling.engine.checkpoint import load_weights, save_model
from nestling.engine.lora import load_adapter, save_adapter
from nestling.engine.model import Model

__all__ = ["StateInfo", "read_info", "read_model", "read_trainer", "thin_out", "write_state"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_OPTIMIZER = "optimizer.safetensors"
_INFO = "state.json"
_ADAPTER = "adapter"
_OLD = ".old-"


class StateInfo(Frozen):
    """What a saved state is."""

    version: int = Field(ge=0)
    """Updates in the weights."""
    count: int = Field(ge=0)
    """Optimiser steps."""
    initial_hash: str
    """Content hash of the weights the run began with: the reference of the KL term."""
    lora_rank: int = Field(ge=0)
    order: int = Field(ge=0)
    """Counts saves, so that older states can be told from newer ones."""


def write_state(
    folder: Path, name: str, *, model: Model, trainer: dict[str, Any], info: StateInfo
) -> None:
    """Write `name` below `folder`, replacing what has that name; raises `LearnerError`."""
    if not _NAME.fullmatch(name):
        raise LearnerError(f"{name!r} cannot name a saved state; use letters, digits, . _ and -")
    target, fresh, old = (folder / f"{prefix}{name}" for prefix in ("", ".new-", _OLD))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        if model.lora is None:
            save_model(fresh, model)
        else:
            save_adapter(fresh / _ADAPTER, model.lora)
        save_file(dict(trainer["optimizer"]), fresh / _OPTIMIZER)
        (fresh / _INFO).write_text(info.model_dump_json(indent=2) + "\n", encoding="utf-8")
        _sync_tree(fresh)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        fresh.rename(target)
        _sync(folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise LearnerError(
            f"the learner could not be saved as {target}: {error}; free disk space or choose "
            f"another folder, then resume"
        ) from error


def read_info(folder: Path, name: str) -> StateInfo:
    """What is saved under `name`; raises `LearnerError`."""
    path = folder / name / _INFO
    try:
        if not path.parent.exists() and (old := folder / f"{_OLD}{name}").exists():
            old.rename(path.parent)
        return StateInfo.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise LearnerError(
            f"{path} is not a saved learner: {error}; expected a name that `save` returned"
        ) from error


def read_model(folder: Path, name: str, like: Model) -> Model:
    """The saved policy as a model of its own; `like` lends shape, tokenizer and (LoRA) the base."""
    root = folder / name
    try:
        if (root / _ADAPTER).is_dir():
            lora = load_adapter(root / _ADAPTER, like.config, like.device)
            weights = like.weights
        else:
            lora, weights = None, load_weights(root, like.device)
    except ModelError as error:
        raise LearnerError(f"{root} cannot be loaded: {error}") from error
    if weights.config != like.config:
        raise LearnerError(f"{root} holds a model of another shape; expected {like.config}")
    return Model(
        config=like.config,
        weights=weights,
        tokenizer=like.tokenizer,
        lora=lora,
        compute_dtype=like.compute_dtype,
    )


def read_trainer(folder: Path, name: str, like: Model) -> dict[str, Any]:
    """What `PolicyTrainer.load_state_dict` takes; raises `LearnerError`."""
    info = read_info(folder, name)
    model = read_model(folder, name, like)
    path = folder / name / _OPTIMIZER
    try:
        optimizer = load_file(path)
    except (OSError, SafetensorError) as error:
        raise LearnerError(
            f"{path} cannot be read: {error}; only the newest states keep their optimiser"
        ) from error
    flat = model.weights.flat if model.lora is None else model.lora.flat
    return {"flat": flat, "count": info.count, "optimizer": optimizer}


def thin_out(folder: Path, *, keep_resumable: int) -> None:
    """Remove the optimiser of all but the newest states; their weights stay."""
    found = sorted(
        (read_info(folder, path.parent.name).order, path.parent)
        for path in folder.glob(f"*/{_INFO}")
        if not path.parent.name.startswith(".")
    )
    for _, path in found[: max(0, len(found) - keep_resumable)]:
        (path / _OPTIMIZER).unlink(missing_ok=True)


def _sync_tree(root: Path) -> None:
    for path in sorted(root.rglob("*")):
        _sync(path)
    _sync(root)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
