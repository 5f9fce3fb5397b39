"""Write prime-rl's rl.toml for a job: its `[prime_rl]` table plus everything a job may not set.

Checked against the configuration classes of prime-rl 0.8.0 (commit 559b447). A job never decides
about deployment, checkpoints, output, environment variables, monitors, harness or runtime.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import tomli_w

from nestling.core.errors import ConfigError
from nestling.jobs.bounds import LARGE, Key
from nestling.jobs.manifest import JobManifest

__all__ = ["HUB_NAMES", "RlRun", "render_rl_toml", "rl_document"]

HUB_NAMES: Final[Mapping[str, str]] = {
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "gemma3-270m": "google/gemma-3-270m-it",
}
"""Catalog name to the model hub's; any other name is passed on as it is."""

_THINKING_RENDERER: Final = "qwen3"
"""Thinks unless told not to, so the key is always written for it."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PACKAGE: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_PART: Final = re.compile(r"(\w+)(?:\[(\d+)\])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RlRun:
    """What the machine room decides about one prime-rl run."""

    name: str
    """Folder of the run below prime-rl's output folder."""
    package: str = "environment"
    """Import name of the job's package; unique per job where several are installed at once."""
    num_train_gpus: int = 1
    num_infer_gpus: int = 1
    gpu_memory_utilization: float = 0.85
    """Share of a GPU that inference takes."""
    output_dir: str = ""
    """Folder of runs; empty: prime-rl's own, in the current folder."""
    ports: tuple[int, int, int] | None = None
    """Of inference, its backend and the environment server; None: prime-rl's own, for one run a machine."""


def render_rl_toml(manifest: JobManifest, model: str, run: RlRun) -> str:
    """The text of rl.toml; see `rl_document`."""
    return tomli_w.dumps(rl_document(manifest, model, run))


def rl_document(manifest: JobManifest, model: str, run: RlRun) -> dict[str, Any]:
    """rl.toml as nested tables.

    Args:
        manifest: the job, of either scale; its own base model is replaced by `model`.
        model: a catalog name, a name of the model hub, or an absolute path of a model folder.
        run: names and resources.

    Raises:
        ConfigError: a name that cannot be used, or a job with a warm-up.
    """
    if not _NAME.fullmatch(run.name) or not _PACKAGE.fullmatch(run.package):
        raise ConfigError(
            f"run name {run.name!r} or package {run.package!r} cannot be used; "
            "expected letters, digits, _ . - (package: a lower-case import name)"
        )
    if manifest.sft is not None:
        raise ConfigError(
            "prime_rl runs no warm-up; expected a job without an [sft] table; remove it"
        )
    document = _fixed(manifest, HUB_NAMES.get(model, model), run)
    can_think = document["orchestrator"]["renderer"]["name"] == _THINKING_RENDERER
    for key in LARGE.keys:
        if _applies(key, manifest) and (can_think or key.name != "enable_thinking"):
            _put(document, key.path, _value(key, manifest))
    source = document["orchestrator"]["train"]["source"][0]
    source["env"]["taskset"] |= manifest.env
    if run.output_dir:
        document["output_dir"] = run.output_dir
    if run.ports is not None:
        inference, backend, environment = run.ports
        document["inference"] |= {"server": {"port": inference}, "backend_port": backend}
        client = {"base_url": f"http://localhost:{inference}/v1"}
        document["orchestrator"] |= {
            "env_server_base_port": environment,
            "model": {"client": client},
        }
    return document


def _fixed(manifest: JobManifest, model: str, run: RlRun) -> dict[str, Any]:
    # A folder's name says nothing, and neither renderer nor tool parser is then found by name.
    known = manifest.base_model if model.startswith("/") else model
    renderer = {"name": _THINKING_RENDERER if "qwen3" in known.lower() else "default"}
    source = {
        "name": "job",
        "env": {
            "taskset": {"id": run.package},
            "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
        },
    }
    return {
        "run": {"name": run.name},
        "deployment": {
            "num_train_gpus": run.num_train_gpus,
            "num_infer_gpus": run.num_infer_gpus,
            "gpus_per_node": run.num_train_gpus + run.num_infer_gpus,
        },
        "model": {"name": model},
        "ckpt": {"interval": manifest.prime_rl.max_steps, "keep_last": 1},
        # only this transport leaves weights that can be served after the run
        "weight_broadcast": {"type": "filesystem"},
        "orchestrator": {"renderer": renderer, "train": {"source": [source]}},
        "inference": {
            "vllm": {
                "gpu_memory_utilization": run.gpu_memory_utilization,
                "tool_call_parser": "hermes",
            }
        },
    }


def _applies(key: Key, manifest: JobManifest) -> bool:
    """Whether the key exists beside the chosen optimizer, scheduler, loss, algo and rank."""
    table = manifest.prime_rl
    if key.name == "lora_rank":
        return table.lora_rank > 0
    if key.name == "length_penalty" and not table.length_penalty:
        return False
    if key.only_with is None:
        return True
    selector, values = key.only_with
    chosen = getattr(table, selector)
    return bool(chosen > 0) if selector == "lora_rank" else chosen in values


def _value(key: Key, manifest: JobManifest) -> Any:  # noqa: ANN401 (a TOML value)
    if key.name == "length_penalty":
        return {"type": "linear"}
    return getattr(manifest.prime_rl, key.name)


def _put(document: dict[str, Any], path: str, value: object) -> None:
    """Set a dotted path; `name[0]` is the first table of a list that already exists."""
    *parents, last = path.split(".")
    table = document
    for parent in parents:
        match = _PART.fullmatch(parent)
        assert match is not None
        table = table.setdefault(match[1], {})
        if match[2] is not None:
            table = table[int(match[2])]
    table[last] = value
