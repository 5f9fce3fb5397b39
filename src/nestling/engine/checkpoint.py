"""Model folders in the Hugging Face layout, safetensors only.

A folder may come from a training job, so nothing in it is trusted: pickles are never opened, every tensor's
name, shape, type and finiteness is checked, and what is wrong is a ModelError that names the file.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nestling.core.errors import ModelError
from nestling.engine.config import ModelConfig
from nestling.engine.model import Model
from nestling.engine.weights import Weights, num_parameters, parts

if TYPE_CHECKING:
    from nestling.engine.tokenizer import Tokenizer

__all__ = ["Model", "load_config", "load_model", "load_weights", "save_model", "save_weights"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def load_model(folder: Path | str, device: str | torch.device = "cpu") -> Model:
    """A model with its tokenizer; master weights are float32 whatever the file holds."""
    from nestling.engine.tokenizer import Tokenizer

    root = Path(folder)
    weights = load_weights(root, device)
    tokenizer = Tokenizer.load(root)
    if tokenizer.vocab_size > weights.config.vocab_size:
        raise ModelError(
            f"{root}: the tokenizer has {tokenizer.vocab_size} tokens but the model only "
            f"{weights.config.vocab_size}; expected a tokenizer of this model"
        )
    return Model(config=weights.config, weights=weights, tokenizer=tokenizer)


def save_model(
    folder: Path | str, model: Model, *, job: int = 0, dtype: torch.dtype = torch.float32
) -> None:
    """Write one job's model, adapters merged; transformers reads the folder as it is."""
    root = Path(folder)
    weights = model.weights if model.lora is None else model.lora.merged(model.weights)
    save_weights(root, weights, job=job, dtype=dtype)
    tokenizer: Tokenizer = model.tokenizer
    tokenizer.save(root)
    ends = {"eos_token_id": tokenizer.turn_end_id, "pad_token_id": tokenizer.pad_id}
    _write_json(root / "generation_config.json", {**ends, "do_sample": True, "temperature": 1.0})
    raw = json.loads((root / "config.json").read_text())
    _write_json(root / "config.json", {**raw, **ends})


def load_config(folder: Path | str) -> ModelConfig:
    """The shape that `config.json` declares."""
    path = Path(folder) / "config.json"
    raw = _read_json(path)
    try:
        return ModelConfig.from_hf(raw)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def load_weights(folder: Path | str, device: str | torch.device = "cpu") -> Weights:
    """Weights without a tokenizer (J = 1, float32)."""
    root = Path(folder)
    config = load_config(root)
    files = _weight_files(root)
    weights = Weights(config, torch.empty(1, num_parameters(config)))
    views = weights.views()
    wanted = {part.hf_name: part for part in parts(config)}
    missing = set(wanted)
    extras: list[tuple[str, Tensor]] = []
    for path, names in files.items():
        for name, tensor in _read_tensors(path, names):
            part = wanted.get(name)
            if part is None:
                extras.append((name, tensor))
                continue
            if tuple(tensor.shape) != part.shape:
                raise ModelError(
                    f"{path}: {name} has shape {list(tensor.shape)}; "
                    f"expected {list(part.shape)} from config.json"
                )
            _check_values(path, name, tensor)
            views[part.slot][0].narrow(0, part.start_row, part.shape[0]).copy_(tensor)
            missing.discard(name)
    if missing:
        listed = ", ".join(sorted(missing)[:3])
        raise ModelError(f"{root}: {len(missing)} tensors are missing, among them {listed}")
    for name, tensor in extras:
        _check_extra(root, name, tensor, views)
    return weights.to(device)


def save_weights(
    folder: Path | str, weights: Weights, *, job: int = 0, dtype: torch.dtype = torch.float32
) -> None:
    """Write `config.json` and `model.safetensors` of one job; `OSError` when that cannot be done."""
    if dtype not in _FLOATS:
        raise ModelError(f"cannot save weights as {dtype}; expected float32, float16 or bfloat16")
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    views = weights.job(job).views()
    tensors = {
        part.hf_name: views[part.slot][0]
        .narrow(0, part.start_row, part.shape[0])
        .detach()
        .to("cpu", dtype, copy=True)
        .contiguous()
        for part in parts(weights.config)
    }
    try:
        save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # the library's own word for a full disk, too
        raise OSError(
            f"{root / 'model.safetensors'} cannot be written: {error}; expected a folder with room "
            "for the weights; free some"
        ) from error
    name = str(dtype).removeprefix("torch.")
    _write_json(root / "config.json", {**weights.config.to_hf(), "dtype": name})


def _weight_files(root: Path) -> dict[Path, list[str] | None]:
    """Each weight file with the tensors wanted from it (None: all)."""
    single, index = root / "model.safetensors", root / "model.safetensors.index.json"
    if index.is_file():
        return _sharded_files(root, index)
    if single.is_file():
        return {single: None}
    pickles = sorted(path.name for path in root.glob("*.bin")) + sorted(
        path.name for path in root.glob("*.pt*")
    )
    if pickles:
        raise ModelError(
            f"{root} holds pickled weights ({pickles[0]}), which are never opened; "
            "expected model.safetensors; convert it where you trust it"
        )
    raise ModelError(f"{root} holds no model.safetensors; expected a Hugging Face model folder")


def _sharded_files(root: Path, index: Path) -> dict[Path, list[str] | None]:
    table = _read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ModelError(f"{index} has no weight_map; expected tensor names mapped to files")
    shards: dict[Path, list[str] | None] = {}
    for name, file in table.items():
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or not file.endswith(".safetensors")
        ):
            raise ModelError(
                f"{index} maps {name!r} to {file!r}; expected a .safetensors file beside the index"
            )
        path = root / file
        if not path.is_file():
            raise ModelError(
                f"{index} names {file}, which does not exist; the folder is incomplete"
            )
        names = shards.setdefault(path, [])
        assert names is not None
        names.append(name)
    return shards


def _read_tensors(path: Path, names: list[str] | None) -> list[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            present = set(file.keys())
            absent = set(names or ()) - present
            if absent:
                raise ModelError(f"{path} lacks {sorted(absent)[0]}, which the index promises")
            return [(name, file.get_tensor(name)) for name in (names or sorted(present))]
    except (SafetensorError, OSError, ValueError, struct.error) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error


def _check_values(path: Path, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _FLOATS:
        raise ModelError(f"{path}: {name} is {tensor.dtype}; expected float32, float16 or bfloat16")
    if not bool(torch.isfinite(tensor).all()):
        raise ModelError(f"{path}: {name} holds NaN or infinity; the training run has diverged")


def _check_extra(root: Path, name: str, tensor: Tensor, views: dict[str, Tensor]) -> None:
    if name.endswith("rotary_emb.inv_freq"):
        return
    if name == "lm_head.weight" and "lm_head" not in views:
        embed = views["embed"][0]
        if tensor.shape == embed.shape and torch.equal(tensor.float(), embed):
            return
        raise ModelError(
            f"{root}: lm_head.weight differs from the embedding although config.json ties them"
        )
    raise ModelError(
        f"{root}: unexpected tensor {name}; expected only those of config.json's layout"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist; expected a Hugging Face model folder") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds {type(raw).__name__}; expected a JSON object")
    return raw


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
