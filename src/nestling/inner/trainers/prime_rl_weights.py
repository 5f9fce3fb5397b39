"""The weights that a prime-rl run leaves, as a whole model of ours.

`broadcasts/step_N` with a `STABLE` marker holds an adapter (LoRA) or the tensors of a whole model, in one file or in
shards, without config or tokenizer. Both come from the pinned base; the folder can be written to by the job's code,
so it is read as any folder from outside: safetensors only, names, shapes and finiteness checked.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

from nestling.core.errors import JobFailedError, ModelError
from nestling.engine.checkpoint import Model, load_weights
from nestling.engine.lora import LoraWeights, load_adapter
from nestling.engine.weights import Weights
from nestling.inner.disk import temporary_folder, writing
from nestling.jobs.manifest import PrimeRl

__all__ = ["ADAPTER_FOLDER", "newest_stable", "trained_weights"]

ADAPTER_FOLDER: Final = "adapter"
"""In a trained model's folder: the adapter that was merged, for servers that load adapters."""
_STEP: Final = re.compile(r"step_(\d+)")
_SHARD: Final = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def newest_stable(run: Path) -> tuple[int, Path] | None:
    """Step and folder of the newest finished broadcast; step 0 is the base itself."""
    found = [
        (int(match[1]), path)
        for path in (run / "broadcasts").glob("step_*")
        if (match := _STEP.fullmatch(path.name)) and (path / "STABLE").is_file()
    ]
    return max(found, default=None)


def trained_weights(
    run: Path, base_folder: Path, base: Model, table: PrimeRl
) -> tuple[Weights, LoraWeights | None]:
    """Whole weights after the last step, and the adapter that was merged into the base for them.

    Raises:
        JobFailedError: `train.no_weights` (none of the last step), `train.weights` (not those of this job),
            `train.diverged` (not finite), `train.disk` (no room to look at them).
    """
    newest = newest_stable(run)
    if newest is None or newest[0] != table.max_steps:
        there = "none" if newest is None else f"step {newest[0]}"
        raise JobFailedError(
            "train.no_weights",
            f"prime-rl ended well, but the newest finished weights are {there}; expected step {table.max_steps}",
        )
    _, folder = newest
    try:
        if table.lora_rank > 0:
            adapter = _adapter(folder, base, table)
            return adapter.merged(base.weights), adapter
        return _whole(folder, base_folder), None
    except ModelError as error:
        reason = "train.diverged" if "has diverged" in str(error) else "train.weights"
        raise JobFailedError(reason, str(error)[:1000]) from error


def _adapter(folder: Path, base: Model, table: PrimeRl) -> LoraWeights:
    adapter = load_adapter(folder, base.config)
    found = (adapter.lora.rank, adapter.lora.alpha)
    if found != (table.lora_rank, table.lora_alpha):
        raise ModelError(
            f"{folder}: the adapter has rank and alpha {found}; expected {(table.lora_rank, table.lora_alpha)}, "
            "as the job says"
        )
    return adapter


def _whole(folder: Path, base_folder: Path) -> Weights:
    """prime-rl's tensors beside the base's config."""
    with temporary_folder("train.disk", "nestling-trained-", folder.parent) as joined:
        with writing("train.disk", joined):
            shutil.copyfile(base_folder / "config.json", joined / "config.json")
            for path in folder.iterdir():
                if _SHARD.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                    os.link(path, joined / path.name)
        return load_weights(joined)
