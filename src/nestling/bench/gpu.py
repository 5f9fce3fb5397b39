"""Speed and memory on a GPU, part by part: each part is measured alone, kept on disk, and not repeated.

Every part takes minutes at most on one H200, so that a machine rented for a short time is used to the end. With the
device `cpu` and small sizes all of it runs anywhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from nestling.bench import gpu_decode, gpu_jobs, gpu_train
from nestling.bench.gpu_shapes import LITTLE, Sizes
from nestling.bench.progress import tell
from nestling.bench.record import Measured
from nestling.config import RunConfig
from nestling.core.errors import ConfigError
from nestling.core.rundir import write_atomic
from nestling.engine.device import use
from nestling.inner.stack_config import StackConfig

__all__ = ["PARTS", "default_sizes", "measure"]

Rows = list[dict[str, Any]]

PARTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "decode": "tokens per second beside transformers, share of the memory's rate",
        "lanes": "tokens per second of several jobs at once",
        "grpo": "a GRPO step of one job beside transformers",
        "stacked": "a multi-turn GRPO step of 1, 8 and 40 jobs at once",
        "agreement": "log-probabilities of sampler and learner",
        "memory": "planned and measured bytes",
        "jobs": "a batch of whole template jobs on one device",
        "devices": "the same on one and on two devices",
    }
)
"""In the order in which they are measured."""
_PER_SHAPE: Final[Mapping[str, Callable[[str, str, Sizes], Rows]]] = MappingProxyType(
    {
        "decode": gpu_decode.decode,
        "lanes": gpu_decode.lanes,
        "grpo": gpu_train.grpo,
        "stacked": gpu_train.stacked,
        "agreement": gpu_train.agreement,
        "memory": gpu_train.memory,
    }
)
_OF_BATCHES: Final = frozenset(
    {"jobs", "job_steps", "eval_items", "workers", "processes", "batches"}
)
"""Sizes that only whole jobs depend on."""
_BIG: Final = frozenset({"smollm2-135m"})
"""Shapes that are not stacked by the dozen here."""


def measure(
    *,
    parts: Sequence[str] = ("decode", "lanes", "grpo", "stacked", "agreement", "memory", "jobs"),
    device: str = "",
    sizes: Sizes | None = None,
    kept: Path | None = None,
    config: RunConfig | None = None,
) -> Measured:
    """Measure some parts; those that `kept` holds, of this device and these sizes, are read from there.

    Args:
        parts: names from `PARTS`.
        device: empty: the first GPU, or the CPU where there is none.
        sizes: how much of everything; None: what suits the device.
        kept: folder with one JSON file per part and shape; None keeps nothing.
        config: of the rooms of `jobs` and `devices`; its trainer is set here.

    Raises:
        ConfigError: an unknown part, or a device that is not there.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ConfigError(f"no part {unknown[0]!r}; expected some of {', '.join(PARTS)}")
    chosen = _device(device)
    use(chosen)
    amount = sizes or default_sizes(chosen)
    settings = {"device": chosen, "device_name": _device_name(chosen), **asdict(amount)}
    runs: Rows = []
    for part, shape, work in _plan(parts, chosen, amount, config or RunConfig()):
        unread = _OF_BATCHES if part in _PER_SHAPE else set()
        decisive = {key: one for key, one in settings.items() if key not in {"shapes", *unread}}
        runs += _kept(part, shape, work, kept, decisive)
    figures = _figures(runs)
    return Measured(
        settings={"parts": list(parts), **settings},
        runs=tuple(runs),
        figures=figures,
        ratios=_ratios(runs),
        columns=("part", "shape", "what", "figure"),
        rows=tuple(_cells(row) for row in runs),
    )


def default_sizes(device: str) -> Sizes:
    """What suits a device; empty: the first GPU, or the CPU where there is none."""
    return Sizes() if _device(device).startswith("cuda") else LITTLE


def _device(name: str) -> str:
    return name or ("cuda:0" if torch.cuda.is_available() else "cpu")


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _plan(
    parts: Sequence[str], device: str, sizes: Sizes, config: RunConfig
) -> list[tuple[str, str, Callable[[], Rows]]]:
    """Part, shape, and the work."""
    found: list[tuple[str, str, Callable[[], Rows]]] = []
    for part in PARTS:
        if part not in parts:
            continue
        if part in _PER_SHAPE:
            for shape in sizes.shapes:
                if shape in _BIG and part in ("lanes", "stacked", "memory"):
                    continue
                found.append((part, shape, _bound(_PER_SHAPE[part], shape, device, sizes)))
        elif part == "jobs":
            found.append((part, "micro", _batch(config, (device,), sizes, sizes.jobs)))
        else:
            found += [
                (part, "1", _batch(config, (device,), sizes, sizes.jobs)),
                (part, "2", _batch(config, _two(device), sizes, 2 * sizes.jobs)),
            ]
    return found


def _bound(
    work: Callable[[str, str, Sizes], Rows], shape: str, device: str, sizes: Sizes
) -> Callable[[], Rows]:
    return lambda: work(shape, device, sizes)


def _batch(
    config: RunConfig, devices: tuple[str, ...], sizes: Sizes, jobs: int
) -> Callable[[], Rows]:
    on_gpu = devices[0].startswith("cuda")
    stack = StackConfig(
        devices=devices,
        processes=sizes.processes,
        max_jobs=max(1, jobs // (len(devices) * sizes.processes)),
        rows_per_job=sizes.rollouts,
        max_len=512,
        precision="tf32" if on_gpu else "float32",
    )
    inner = config.inner.model_copy(
        update={
            "trainer": "stacked",
            "stack": stack,
            "eval_items": sizes.eval_items,
            "leak_items": 0,
        }
    )
    room = config.model_copy(update={"inner": inner})
    return lambda: gpu_jobs.batch(room, sizes, jobs=jobs)


def _two(device: str) -> tuple[str, ...]:
    """Two devices; on a CPU one process stands for both."""
    return ("cuda:0", "cuda:1") if device.startswith("cuda") else (device,)


def _kept(
    part: str,
    shape: str,
    work: Callable[[], Rows],
    folder: Path | None,
    settings: Mapping[str, Any],
) -> Rows:
    """Measured now, or under the same settings before."""
    path = None if folder is None else folder / f"{part}-{shape}.json"
    same = json.loads(json.dumps(settings))  # as a file has it: lists for tuples
    if path is not None and path.exists():
        kept = json.loads(path.read_text("utf-8"))
        if kept["settings"] == same:
            return list(kept["rows"])
    tell(f"{part} {shape}")
    started = time.perf_counter()
    rows: Rows = [{"part": part, **({"shape": shape} | row)} for row in work()]
    seconds = time.perf_counter() - started
    for row in rows:
        row["part_wall_s"] = round(seconds, 1)
    if path is not None:
        text = json.dumps({"settings": same, "rows": rows}, indent=1)
        write_atomic(path, f"{text}\n".encode())
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rows


def _figures(runs: Rows) -> dict[str, Any]:
    """The rows a reader looks for first, by name."""
    found: dict[str, Any] = {}
    for row in runs:
        name = "_".join(str(row[key]) for key in ("part", "shape", "work", "batch") if key in row)
        by = row.get("by") or row.get("precision") or row.get("jobs")
        found[f"{name}_{by}".replace(" ", "_")] = _figure(row)
    return found


def _figure(row: dict[str, Any]) -> float | None:
    for key in ("tokens_per_s", "per_job_s", "wall_s", "max_abs_logp_diff", "peak_bytes"):
        if key in row:
            value = row[key]
            return None if value is None else float(value)
    return None


def _ratios(runs: Rows) -> dict[str, float]:
    """Ours over theirs in seconds: below 1 is faster."""
    found: dict[str, float] = {}
    named = (
        ("decode", "transformers", "gpu_decode_vs_hf"),
        ("grpo", "transformers", "gpu_grpo_vs_transformers"),
        ("grpo", "trl", "gpu_grpo_vs_trl"),
    )
    for part, peer, name in named:
        rows = [row for row in runs if row["part"] == part]
        theirs = {
            (row["shape"], row.get("work")): row["median_s"] for row in rows if row["by"] == peer
        }
        for row in rows:
            key = (row["shape"], row.get("work"))
            if row["by"] in ("transformers", "trl") or key not in theirs:
                continue
            words = [name, *(str(word) for word in key if word), str(row["by"]).split()[-1]]
            found["_".join(words)] = round(row["median_s"] / theirs[key], 5)
    one = [row["jobs_per_s"] for row in runs if row["part"] == "devices" and row["devices"] == 1]
    two = [row["jobs_per_s"] for row in runs if row["part"] == "devices" and row["devices"] == 2]
    if one and two:
        found["one_device_vs_two"] = round(one[-1] / two[-1], 4)
    return found


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    what = " ".join(
        str(row[key]) for key in ("work", "batch", "by", "precision", "jobs") if key in row
    )
    value = _figure(row)
    share = (
        f" ({row['roofline_share']:.0%} of the memory's rate)" if "roofline_share" in row else ""
    )
    return row["part"], str(row["shape"]), what, ("-" if value is None else f"{value:.4g}") + share
