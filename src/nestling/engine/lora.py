"""Low-rank adapters (LoRA): per job, on top of base weights that all jobs may share.

Axes: J job, r rank. An adapted projection computes `W x + (alpha / r) * up (down x)`; `up` starts at zero, so
a fresh adapter changes nothing. Source: Hu et al. 2021, arXiv:2106.09685, section 4.1. Folders are written
and read in the PEFT layout (`adapter_config.json`, `adapter_model.safetensors`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field, ValidationError, field_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nestling.core.errors import ConfigError, ModelError
from nestling.core.frozen import Frozen
from nestling.engine.config import ModelConfig
from nestling.engine.params import Adapter
from nestling.engine.weights import Weights, parts

__all__ = [
    "LoraConfig",
    "LoraWeights",
    "adapter_base",
    "load_adapter",
    "nearest_adapter",
    "save_adapter",
]

_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."
_CONFIG_FILE = "adapter_config.json"


class LoraConfig(Frozen):
    """Which projections are adapted, and how strongly."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, ge=0)
    """The update is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of adapter inputs set to zero in training."""
    target_modules: tuple[str, ...] = _MODULES

    @field_validator("target_modules")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in value if name not in _MODULES]
        if unknown or not value:
            raise ValueError(f"target_modules={list(value)}; expected some of {list(_MODULES)}")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Where one adapted projection's two matrices are."""

    module: str
    slot: str
    start_row: int
    out_size: int
    in_size: int
    offset: int


class LoraWeights:
    """The adapters of J jobs as one flat float32 tensor [J, P]."""

    def __init__(self, config: ModelConfig, lora: LoraConfig, flat: Tensor) -> None:
        self.config, self.lora = config, lora
        self.pairs, size = _pairs(config, lora)
        if flat.dim() != 2 or flat.shape[1] != size:
            raise ConfigError(
                f"flat adapters have shape {tuple(flat.shape)}; expected [jobs, {size}]"
            )
        self.flat = flat

    @property
    def num_jobs(self) -> int:
        """J."""
        return self.flat.shape[0]

    @staticmethod
    def size(config: ModelConfig, lora: LoraConfig) -> int:
        """P: scalars of one job's adapters."""
        return _pairs(config, lora)[1]

    @classmethod
    def init(
        cls,
        config: ModelConfig,
        lora: LoraConfig,
        num_jobs: int = 1,
        generator: torch.Generator | None = None,
        device: str | torch.device = "cpu",
    ) -> LoraWeights:
        """Fresh adapters: `down` uniform in +-1/sqrt(inputs), `up` zero."""
        pairs, size = _pairs(config, lora)
        flat = torch.zeros(num_jobs, size)
        source = generator or torch.Generator().manual_seed(0)
        for pair in pairs:
            bound = 1 / math.sqrt(pair.in_size)
            span = flat[:, pair.offset : pair.offset + lora.rank * pair.in_size]
            span.uniform_(-bound, bound, generator=source)
        return cls(config, lora, flat.to(device))

    @classmethod
    def seeded(
        cls, config: ModelConfig, lora: LoraConfig, seed: int, device: str | torch.device = "cpu"
    ) -> LoraWeights:
        """`init` of one job with a generator of its own, for callers that know no torch."""
        source = torch.Generator().manual_seed(seed)
        return cls.init(config, lora, generator=source, device=device)

    def views(self, flat: Tensor | None = None) -> dict[str, Tensor]:
        """Matrices by PEFT name (`...q_proj.lora_A.weight` [J, r, in], `lora_B` [J, out, r])."""
        source, rank, found = self.flat if flat is None else flat, self.lora.rank, {}
        for pair in self.pairs:
            middle = pair.offset + rank * pair.in_size
            end = middle + rank * pair.out_size
            jobs = source.shape[0]
            down = source[:, pair.offset : middle].view(jobs, rank, pair.in_size)
            found[pair.module + ".lora_A.weight"] = down
            found[pair.module + ".lora_B.weight"] = source[:, middle:end].view(
                jobs, pair.out_size, rank
            )
        return found

    def matrices(self) -> list[tuple[int, int, int]]:
        """(offset, rows, columns) of every matrix inside `flat`."""
        rank, found = self.lora.rank, []
        for pair in self.pairs:
            found.append((pair.offset, rank, pair.in_size))
            found.append((pair.offset + rank * pair.in_size, pair.out_size, rank))
        return found

    def adapters(self, views: dict[str, Tensor] | None = None) -> dict[str, tuple[Adapter, ...]]:
        """Adapters by projection name, in row order; detached unless `views` are given."""
        source = views or {name: view.detach() for name, view in self.views().items()}
        scale = self.lora.alpha / self.lora.rank
        found: dict[str, tuple[Adapter, ...]] = {}
        for pair in self.pairs:
            one = Adapter(
                pair.start_row,
                source[pair.module + ".lora_A.weight"],
                source[pair.module + ".lora_B.weight"],
                scale,
            )
            found[pair.slot] = (*found.get(pair.slot, ()), one)
        return found

    def merged(self, base: Weights) -> Weights:
        """Plain weights [J, P] with the adapters added; a base of J = 1 serves all jobs."""
        jobs = max(self.num_jobs, base.num_jobs)
        flat = base.flat.detach().expand(jobs, -1).clone()
        merged = Weights(base.config, flat)
        views = merged.views()
        for slot, adapters in self.adapters().items():
            for one in adapters:
                target = views[slot].narrow(1, one.start_row, one.up.shape[1])
                target.add_(torch.matmul(one.up, one.down) * one.scale)
        return merged

    def clone(self) -> LoraWeights:
        """A copy that shares nothing."""
        return LoraWeights(self.config, self.lora, self.flat.detach().clone())

    @classmethod
    def stack(cls, many: Sequence[LoraWeights]) -> LoraWeights:
        """Adapters of several jobs as one stack; shapes must agree."""
        if not many or any(
            one.config != many[0].config or one.lora != many[0].lora for one in many
        ):
            raise ConfigError(
                "only adapters of one model shape and one LoRA setting can be stacked"
            )
        return cls(many[0].config, many[0].lora, torch.cat([one.flat.detach() for one in many]))


def nearest_adapter(base: Weights, trained: Weights, rank: int) -> tuple[LoraWeights, float]:
    """The adapter (J = 1) closest to what training changed, and the share of the change that it holds.

    Per projection the best one of this rank in the Frobenius norm: the change's largest singular values
    (Eckart and Young 1936, Psychometrika 1, 211-218). Embeddings and norms stay the base's. The share is one
    minus what is missing over the whole change, both as sums of squares over all weights.

    Raises:
        ConfigError: not the same shape, or not one job each.
    """
    if base.config != trained.config or base.num_jobs != 1 or trained.num_jobs != 1:
        raise ConfigError("expected two models of one shape, one job each")
    lora = LoraConfig(rank=rank, alpha=float(rank))
    adapter = LoraWeights(base.config, lora, torch.zeros(1, LoraWeights.size(base.config, lora)))
    views, old, new = adapter.views(), base.views(), trained.views()
    kept = 0.0
    for pair in adapter.pairs:
        rows = slice(pair.start_row, pair.start_row + pair.out_size)
        change = (new[pair.slot][0, rows] - old[pair.slot][0, rows]).detach().double().cpu()
        left, values, right = torch.linalg.svd(change, full_matrices=False)
        count = min(rank, len(values))
        root = values[:count].sqrt()
        views[pair.module + ".lora_A.weight"][0, :count] = root[:, None] * right[:count]
        views[pair.module + ".lora_B.weight"][0, :, :count] = left[:, :count] * root
        kept += float(values[:count].square().sum())
    whole = float((trained.flat.detach().double() - base.flat.detach().double()).square().sum())
    return adapter, kept / whole if whole else 1.0


def save_adapter(
    folder: Path | str,
    adapter: LoraWeights,
    *,
    job: int = 0,
    base_model: str = "",
    half: bool = False,
) -> None:
    """Write one job's adapter as a PEFT folder, `half`: in float16; `OSError` when that cannot be done."""
    dtype = torch.float16 if half else torch.float32
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    tensors = {
        _PREFIX + name: view[job].detach().to("cpu", dtype, copy=True).contiguous()
        for name, view in adapter.views().items()
    }
    path = root / "adapter_model.safetensors"
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # the library's own word for a full disk, too
        raise OSError(
            f"{path} cannot be written: {error}; expected a folder with room for it; free some"
        ) from error
    raw = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.lora.rank,
        "lora_alpha": adapter.lora.alpha,
        "lora_dropout": adapter.lora.dropout,
        "target_modules": list(adapter.lora.target_modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (root / _CONFIG_FILE).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def adapter_base(folder: Path) -> str:
    """Name or path of the model that the adapter in a PEFT folder belongs to; ModelError when it names none."""
    try:
        name = json.loads((folder / _CONFIG_FILE).read_text("utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder}/{_CONFIG_FILE} names no base model: {error}") from error
    return str(name)


def load_adapter(
    folder: Path | str, config: ModelConfig, device: str | torch.device = "cpu"
) -> LoraWeights:
    """Read a PEFT folder for a model of this shape (J = 1); ModelError says what does not fit.

    Names may lack PEFT's prefix, as those that prime-rl writes do.
    """
    root = Path(folder)
    path = root / "adapter_model.safetensors"
    try:
        raw = json.loads((root / _CONFIG_FILE).read_text(encoding="utf-8"))
        lora = LoraConfig(
            rank=raw["r"],
            alpha=raw["lora_alpha"],
            dropout=raw.get("lora_dropout", 0.0),
            target_modules=tuple(sorted(raw["target_modules"], key=_MODULES.index)),
        )
        tensors = {name.removeprefix(_PREFIX): one for name, one in load_file(path).items()}
    except (OSError, ValueError, KeyError, TypeError, ValidationError, SafetensorError) as error:
        raise ModelError(f"{root} is not a LoRA adapter this model can take: {error}") from error
    adapter = LoraWeights(config, lora, torch.zeros(1, _pairs(config, lora)[1]))
    views = adapter.views()
    if set(tensors) != set(views):
        odd = sorted(set(tensors) ^ set(views))[0]
        raise ModelError(f"{path}: {odd} is missing or not expected for this model and config")
    for name, view in views.items():
        tensor = tensors[name]
        if tensor.shape != view.shape[1:]:
            raise ModelError(
                f"{path}: {name} has shape {list(tensor.shape)}; expected {list(view.shape[1:])}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{path}: {name} holds NaN or infinity; the training run has diverged")
        view[0].copy_(tensor)
    adapter.flat = adapter.flat.to(device)
    return adapter


def _pairs(config: ModelConfig, lora: LoraConfig) -> tuple[list[_Pair], int]:
    found, offset = [], 0
    for part in parts(config):
        module = part.hf_name.removesuffix(".weight")
        if part.hf_name == module or module.rsplit(".", 1)[-1] not in lora.target_modules:
            continue
        out_size, in_size = part.shape
        found.append(
            _Pair(
                module=module,
                slot=part.slot,
                start_row=part.start_row,
                out_size=out_size,
                in_size=in_size,
                offset=offset,
            )
        )
        offset += lora.rank * (out_size + in_size)
    return found, offset
