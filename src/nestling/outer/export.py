"""A run's trained agent as a folder that other software loads, with a card written from the run.

All weights: a Hugging Face model folder. An adapter: a PEFT folder, with the model it belongs to in
`base/` and both together in `merged/`, so that it can be used without PEFT too. An agent trained with
all weights can be written as the adapter nearest to it as well, which is small and not the same.
"""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from nestling.core.errors import ConfigError, ModelError
from nestling.engine.checkpoint import Model, load_model, save_model
from nestling.engine.lora import LoraWeights, load_adapter, nearest_adapter, save_adapter
from nestling.outer.export_card import CardFacts, read_facts, render_card
from nestling.outer.store_log import Checkpoint, checkpoints
from nestling.store import RunStore

__all__ = ["BASE", "MERGED", "Exported", "export_agent"]

BASE: Final = "base"
MERGED: Final = "merged"
_ADAPTER: Final = "adapter"
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    folder: Path
    kind: Literal["model", "adapter"]
    step: int
    version: int
    """Updates in the weights."""
    params: int
    """Of the whole model, or of the adapter."""
    kept: float = 1.0
    """Share of what training changed that an adapter made of all weights holds; see `nearest_adapter`."""


def export_agent(
    run: Path,
    out: Path,
    *,
    find_base: Callable[[str], Path],
    load_base: Callable[[Path], Model] = load_model,
    step: int | None = None,
    adapter_only: bool = False,
    rank: int | None = None,
    command: str = "",
) -> Exported:
    """Write the agent after `step` (None: the newest saved one) to `out`, which must not exist yet.

    `find_base` gives the folder of the model that the recipe calls by this name; an adapter needs it,
    and it lends tokenizer files and licence to all. `load_base` reads it. With `adapter_only`, `base/` and `merged/` are
    left out, and the adapter names its base as the recipe does. `rank` makes an adapter of an agent that
    was trained with all weights, in float16. The folder appears by one rename.

    Raises:
        ConfigError: no run, no such step, `out` exists, or the base is missing.
        ModelError: what was saved is damaged, or the base is not the one of the run.
        StoreError: the run's memory is damaged.
    """
    if out.exists():
        raise ConfigError(f"{out} exists; expected a new folder; remove it or choose another --out")
    recipe = _recipe(run)
    if recipe.get("learner", {}).get("kind") == "tinker":
        raise ConfigError(
            f"the weights of {run} are at the service that trained them, not in the run folder; expected "
            "a run of the embedded learner; the files in its learner folder name the checkpoints, which "
            "tinker-cookbook's `weights.download` fetches"
        )
    with RunStore.open_reader(run / "run.db") as store:
        saved = _chosen(checkpoints(store), run, step)
        facts = read_facts(store, recipe, step=saved.step, version=saved.version)
    source = run / "learner" / saved.learner_ref
    base = _base_folder(find_base, recipe)
    fresh = out.with_name(f".new-{out.name}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        kept = 1.0
        if (source / _ADAPTER).is_dir():
            if rank is not None:
                raise ConfigError(
                    f"{run} trained an adapter, whose rank is in its recipe; expected a run with all "
                    f"weights; leave out --rank"
                )
            began = _began_with(source, base, load_base)
            adapter = load_adapter(source / _ADAPTER, began.config)
        elif rank is not None:
            began = _began_with(source, base, load_base)
            adapter, kept = nearest_adapter(began.weights, load_model(source).weights, rank)
        else:
            adapter = None
        if adapter is None:
            kind, params = "model", _write_model(load_model(source), base, fresh)
        else:
            name = recipe["agent"]["model"] if adapter_only else f"./{BASE}"
            kind = "adapter"
            params = _write_adapter(began, adapter, base, fresh, name=name, half=rank is not None)
        _describe(fresh, facts, kind=kind, params=params, kept=kept, base=base, command=command)
        fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return Exported(
        folder=out,
        kind="adapter" if kind == "adapter" else "model",
        step=saved.step,
        version=saved.version,
        params=params,
        kept=kept,
    )


def _recipe(run: Path) -> dict[str, Any]:
    path = run / "config.toml"
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; expected the folder of a run; check the path"
        ) from error


def _chosen(saved: list[Checkpoint], run: Path, step: int | None) -> Checkpoint:
    """The state to export, when its weights are there."""
    here = [one for one in saved if (run / "learner" / one.learner_ref).is_dir()]
    if not here:
        raise ConfigError(
            f"{run} has saved no agent; expected at least one step; let the run go on"
        )
    if step is None:
        return here[-1]
    for one in here:
        if one.step == step:
            return one
    known = ", ".join(str(one.step) for one in here)
    raise ConfigError(f"{run} has no agent of step {step}; expected one of {known}; choose one")


def _base_folder(find_base: Callable[[str], Path], recipe: dict[str, Any]) -> Path | None:
    """None when the model the run began with is not on this machine."""
    name = recipe.get("agent", {}).get("model")
    try:
        return find_base(name) if isinstance(name, str) else None
    except ConfigError:
        return None


def _write_model(model: Model, base: Path | None, out: Path) -> int:
    save_model(out, model)
    _copy_tokenizer(base, out)
    return int(model.weights.flat.shape[1])


def _began_with(source: Path, base: Path | None, load_base: Callable[[Path], Model]) -> Model:
    """The model that the run which saved `source` began with."""
    if base is None:
        raise ConfigError(
            f"{source} needs the model that the run began with, which is not here; expected agent.model "
            f"of the run's config.toml; put that model back, or export where it is"
        )
    model = load_base(base)
    try:
        began = json.loads((source / "state.json").read_text("utf-8"))["initial_hash"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{source}/state.json cannot be read: {error}; expected what the learner saved; "
            f"choose another --step"
        ) from error
    found = model.weights.content_hash()
    if began != found:
        raise ModelError(
            f"{base} holds other weights ({found[:12]}) than the run began with "
            f"({str(began)[:12]}); expected the same; put the old ones back"
        )
    return model


def _write_adapter(
    began: Model, adapter: LoraWeights, base: Path | None, out: Path, *, name: str, half: bool
) -> int:
    """Under the name `./base` with the models beside it; else the adapter alone."""
    save_adapter(out, adapter, base_model=name, half=half)
    began.tokenizer.save(out)
    _copy_tokenizer(base, out)
    if name == f"./{BASE}":  # with ./ it can never be taken for the name of a model on a hub
        _write_model(began, base, out / BASE)
        both = Model(
            config=began.config, weights=began.weights, tokenizer=began.tokenizer, lora=adapter
        )
        _write_model(both, base, out / MERGED)
    return int(adapter.flat.shape[1])


def _copy_tokenizer(base: Path | None, out: Path) -> None:
    """The base's own files: they may hold a richer chat template than ours."""
    for name in _TOKENIZER_FILES:
        if base is not None and (base / name).is_file():
            shutil.copyfile(base / name, out / name)


def _describe(
    out: Path,
    facts: CardFacts,
    *,
    kind: str,
    params: int,
    kept: float,
    base: Path | None,
    command: str,
) -> None:
    """The card, the recipe, and the temperature that belongs to the agent."""
    alone = kind == "adapter" and not (out / BASE).is_dir()
    card = render_card(
        facts, kind=kind, params=params, kept=kept, alone=alone, base=base, command=command
    )
    (out / "README.md").write_text(card, encoding="utf-8")
    (out / "recipe.toml").write_text(facts.recipe_text, encoding="utf-8")
    for path in (out / "generation_config.json", out / MERGED / "generation_config.json"):
        if path.is_file() and facts.temperature is not None:
            settings = json.loads(path.read_text("utf-8"))
            settings["temperature"] = facts.temperature
            path.write_text(json.dumps(settings, indent=2) + os.linesep, encoding="utf-8")
