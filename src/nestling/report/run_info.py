"""What the run folder says about the run as a whole: names, versions, configuration, times."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from nestling.agent.reward import RewardWeights
from nestling.core.errors import StoreError
from nestling.core.rundir import RunDir
from nestling.report.run_data import RunInfo
from nestling.store import RunStore

__all__ = [
    "COMMIT_KEY",
    "MACHINE_KEY",
    "NAME_KEY",
    "VERSION_KEY",
    "flatten",
    "recorded_weights",
    "run_info",
]

NAME_KEY = "run.name"
"""Meta keys of the store, written by whoever starts the run; each may be missing."""
VERSION_KEY = "run.version"
COMMIT_KEY = "run.commit"
MACHINE_KEY = "run.machine"
"""One line: processor, cores, memory, GPUs."""


def run_info(folder: RunDir, store: RunStore) -> RunInfo:
    """The run as a whole; raises `StoreError` when its config.toml is not TOML."""
    config = _config(folder)
    flat = dict(flatten(config))
    first, last = store.events.since(0, 1), store.events.since(store.events.last_seq() - 1, 1)
    return RunInfo(
        name=store.meta(NAME_KEY) or folder.root.resolve().name,
        version=store.meta(VERSION_KEY),
        commit=store.meta(COMMIT_KEY),
        machine=store.meta(MACHINE_KEY),
        config=config,
        seeds={
            name: value
            for name, value in flat.items()
            if name.rpartition(".")[2].endswith("seed") and isinstance(value, int)
        },
        planned_steps=_planned_steps(config),
        started_at=first[0].at if first else None,
        last_at=last[0].at if last else None,
    )


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a nested table, in its order."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def recorded_weights(config: Mapping[str, Any]) -> RewardWeights | None:
    """The enforced reward weights, wherever the configuration holds them; None when nowhere."""
    if "by_attempt" in config and "quality" in config:
        try:
            return RewardWeights.model_validate(dict(config))
        except ValidationError:
            return None
    for value in config.values():
        found = recorded_weights(value) if isinstance(value, Mapping) else None
        if found is not None:
            return found
    return None


def _config(folder: RunDir) -> dict[str, Any]:
    try:
        return tomllib.loads(folder.config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StoreError(
            f"cannot read {folder.config}: {error}; expected the resolved configuration of the "
            f"run as TOML; restore it, or remove it to have a report without it"
        ) from error


def _planned_steps(config: Mapping[str, Any]) -> int | None:
    outer = config.get("outer")
    table = outer if isinstance(outer, Mapping) else config
    steps = table.get("steps")
    return steps if isinstance(steps, int) else None
