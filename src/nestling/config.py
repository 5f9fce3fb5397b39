"""A run's recipe: one frozen model joined from each package's own, read from TOML and `--set`.

The resolved recipe is written into the run folder and is enough to repeat the run.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, Discriminator, Field, Tag, ValidationError

from nestling.agent.reward import RewardKind, RewardWeights
from nestling.core.errors import ConfigError
from nestling.core.frozen import Frozen
from nestling.families.registry import HELD_OUT, TRAINING
from nestling.fleet.budget import Caps
from nestling.fleet.pods.config import RunpodFleet
from nestling.fleet.slots import Gpu
from nestling.inner.models_config import ModelsConfig
from nestling.inner.openai_config import OpenAiConfig
from nestling.inner.prime_rl_config import PrimeRlConfig
from nestling.inner.stack_config import StackConfig
from nestling.outer.config import EmbeddedConfig, OuterConfig, TinkerConfig

__all__ = [
    "AgentConfig",
    "FamiliesConfig",
    "FleetConfig",
    "InnerConfig",
    "LearnerConfig",
    "LocalFleet",
    "ModelsConfig",
    "RayFleet",
    "ReferenceArm",
    "ReferenceConfig",
    "RunConfig",
    "RunpodFleet",
    "load_recipe",
    "recipe_toml",
]

ReferenceArm = Literal["noop", "random", "template", "oracle"]


class FamiliesConfig(Frozen):
    """What is taught and what is only measured."""

    training: tuple[str, ...] = TRAINING
    """Families whose episodes train the agent."""
    held_out: tuple[str, ...] = HELD_OUT
    """Families of the sweeps; the agent never trains on them."""


class AgentConfig(Frozen):
    """The policy that writes jobs."""

    model: str = "hatchling"
    """A shipped agent's name, a model folder, or an open model that `nestling models fetch` brought."""
    style: Literal["compact", "full"] = "compact"
    """Prompt: compact for tiny models, full with tool schemas for large ones."""
    max_turns: int = Field(16, ge=2, le=200)
    """Turns after which an episode ends."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """Where the agent is sampled and trained."""
    template_options: dict[str, bool | int | str] = Field(default_factory=dict)
    """Switches of the model's own chat template, with `learner.kind = "tinker"`."""


class RewardConfig(Frozen):
    """How an episode is paid; both kinds are always computed and recorded."""

    kind: RewardKind = "seed"
    """`seed` is the published formula; `paired` pays only what training is shown to have added."""
    weights: RewardWeights = RewardWeights()


class InnerConfig(Frozen):
    """How jobs are trained and scored."""

    trainer: Literal["embedded", "stacked", "prime_rl"] = "embedded"
    """embedded: each worker holds its job's model; stacked: a process or more per device hold all of them;
    prime_rl: prime-rl's own program, which runs the job's code outside the jail."""
    stack: StackConfig = StackConfig()
    """Read when `trainer` is stacked."""
    prime_rl: PrimeRlConfig = PrimeRlConfig()
    """Read when `trainer` is prime_rl."""
    scorer: Literal["embedded", "openai"] = "embedded"
    """embedded: models are sampled here; openai: by vLLM or another OpenAI-compatible server."""
    openai: OpenAiConfig = OpenAiConfig()
    """Read when `scorer` is openai."""
    eval_items: int = Field(200, ge=8, le=10_000)
    """Hidden items per scoring; the same ones before and after training."""
    split: Literal["b", "c"] = "b"
    """Hidden set that pays. No recipe and no setting may say c, the sealed one: `nestling eval-agent --sealed`
    does, which keeps a record."""
    train_wall_s: float = Field(300.0, gt=0)
    """Wall-clock limit of one training."""
    score_wall_s: float = Field(300.0, gt=0)
    """Wall-clock limit of one scoring."""
    keep_models: bool = False
    """Keep every trained small model in the run folder."""
    seed: int = Field(0, ge=0)
    """Root of the training seeds; the job's hash is mixed in."""
    leak_items: int = Field(400, ge=0, le=10_000)
    """Hidden items per set that training rows are compared with; 0 skips the comparison."""


class LocalFleet(Frozen):
    """Worker processes on this machine, on its cores or on its GPUs."""

    kind: Literal["local"] = "local"
    workers: int = Field(0, ge=0, le=4096)
    """0: one per `threads` cores that this process may use, or as many as the GPUs have room for."""
    machine: str = "cpu-core"
    """What a worker runs on, by its name in the price table."""
    workers_per_machine: int = Field(1, ge=1, le=4096)
    """Workers that share one such machine and its price; hours in which none of them works are not counted."""
    threads: int = Field(1, ge=1, le=256)
    """Of each worker."""
    pin_cores: bool = False
    """Keep each worker on cores of its own; for a machine that does nothing else."""
    gpus: tuple[Gpu, ...] | Literal["auto"] = ()
    """`auto`: all that nvidia-smi lists; or a list such as `[{memory_gib=140, jobs=4}]`; each worker
    then sees one of them."""
    gpu_job_gib: float = Field(4.0, gt=0)
    """GPU memory for one job, where a GPU does not say how many jobs it takes."""
    worker_memory_gib: float = Field(0.0, ge=0)
    """A worker whose processes take more is ended, its job with it; 0: an even share of this machine."""
    least_free_gib: float = Field(0.5, ge=0)
    """With less free memory on this machine no new job is started beside one that runs."""


class RayFleet(Frozen):
    """Workers on the nodes of a Ray cluster; needs the extra `ray`."""

    kind: Literal["ray"] = "ray"
    address: str = ""
    """`host:port` of the head; `auto`: the cluster that this machine is in; empty: start one here."""
    workers: int = Field(2, ge=1, le=100_000)
    """Those that the cluster has no room for start when there is room."""
    num_cpus: float = Field(1.0, gt=0)
    """Of a node, for each worker, as are the next three."""
    num_gpus: float = Field(0.0, ge=0)
    """A fraction lets several workers share a GPU."""
    memory_bytes: int = Field(0, ge=0)
    """0: not counted."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom resources by name, for example to keep workers on one kind of node."""
    machine: str = "cpu-core"
    """What a worker runs on, by its name in the price table."""
    workers_per_machine: int = Field(1, ge=1, le=4096)
    """Workers that share one such machine and its price; hours in which none of them works are not counted."""


def _kind_of_fleet(value: object) -> str:
    kind = value.get("kind", "local") if isinstance(value, dict) else getattr(value, "kind", "")
    return str(kind)


FleetConfig = Annotated[
    Annotated[LocalFleet, Tag("local")]
    | Annotated[RayFleet, Tag("ray")]
    | Annotated[RunpodFleet, Tag("runpod")],
    Discriminator(
        _kind_of_fleet,
        custom_error_type="fleet_kind",
        custom_error_message="fleet.kind should be local, ray or runpod",
    ),
]
"""By `kind`; a table without one is local."""

_FLEETS: dict[str, type[Frozen]] = {
    "local": LocalFleet,
    "ray": RayFleet,
    "runpod": RunpodFleet,
}


def _kind_of_learner(value: object) -> str:
    kind = value.get("kind", "embedded") if isinstance(value, dict) else getattr(value, "kind", "")
    return str(kind)


LearnerConfig = Annotated[
    Annotated[EmbeddedConfig, Tag("embedded")] | Annotated[TinkerConfig, Tag("tinker")],
    Discriminator(
        _kind_of_learner,
        custom_error_type="learner_kind",
        custom_error_message="learner.kind should be embedded or tinker",
    ),
]
"""By `kind`; a table without one is embedded."""

_LEARNERS: dict[str, type[Frozen]] = {"embedded": EmbeddedConfig, "tinker": TinkerConfig}


class ReferenceConfig(Frozen):
    """Scripted policies that are played in every sweep, for comparison."""

    arms: tuple[ReferenceArm, ...] = ("noop", "random", "template")
    """Which ones."""
    training_families: bool = True
    """Sweep the training families too, not only the held-out ones."""


class RunConfig(Frozen):
    """Everything a run needs; every field has a default that runs on two cores."""

    name: str = Field("run", pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")
    """Of the run folder, and in reports."""
    families: FamiliesConfig = FamiliesConfig()
    agent: AgentConfig = AgentConfig()
    reward: RewardConfig = RewardConfig()
    outer: OuterConfig = OuterConfig()
    learner: LearnerConfig = EmbeddedConfig()
    models: ModelsConfig = ModelsConfig()
    inner: InnerConfig = InnerConfig()
    fleet: FleetConfig = LocalFleet()
    references: ReferenceConfig = ReferenceConfig()
    budget: Caps = Caps()
    """Caps in USD; None is no cap."""
    unsafe_no_jail: bool = False
    """Run agent-written code without a jail. Only for code you trust; recorded in the run."""


def load_recipe(
    path: Path | None, settings: Sequence[str] = (), *, sealed: bool = False
) -> RunConfig:
    """Read a recipe and apply `a.b=value` settings; values are TOML, else plain text.

    Args:
        path: the file; None: the defaults.
        settings: applied in this order.
        sealed: the file belongs to a recorded opening of hidden set C, so it may name it.

    Raises:
        ConfigError: unreadable file, unknown key (with the nearest one), value out of bounds, set C.
    """
    document = _read(path) if path is not None else {}
    for setting in settings:
        _apply(document, setting)
    try:
        config = RunConfig.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error))) from error
    if config.inner.split == "c" and not sealed:
        raise ConfigError(
            "inner.split = 'c' is the sealed hidden set; expected b; "
            "only `nestling eval-agent --sealed` opens it, and records that it did"
        )
    return config


def recipe_toml(config: RunConfig) -> str:
    """The whole recipe as TOML; reading it gives the same recipe."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        near = sorted(str(one) for one in Path("recipes").glob("*.toml"))
        hint = f"; recipes here: {', '.join(near)}" if near else ""
        raise ConfigError(f"recipe {path} does not exist{hint}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}; expected UTF-8 TOML") from error


def _apply(document: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {setting!r}; expected a.b=value, for example outer.steps=10")
    *parents, name = key.strip().split(".")
    table = document
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {setting!r}: {parent} is a value, not a table")
    table[name] = _value(text)


def _value(text: str) -> Any:  # noqa: ANN401 (whatever TOML says)
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(error: ValidationError) -> Iterator[str]:
    """One line per mistake: where, what, expected, nearest key."""
    for item in error.errors():
        path, model = _find(item["loc"])
        where = ".".join(path)
        if item["type"] == "extra_forbidden":
            known = sorted(model.model_fields)
            near = difflib.get_close_matches(path[-1], known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
            yield f"recipe: unknown key {where}; {hint}"
        elif item["type"] == "missing":
            yield f"recipe: {where} is missing; give it, for example with --set {where}=VALUE"
        else:
            yield f"recipe: {where} = {item['input']!r}: {item['msg']}"


def _find(location: tuple[int | str, ...]) -> tuple[list[str], type[BaseModel]]:
    """The key as a person writes it, and the table that it is, or should be, in."""
    path: list[str] = []
    model: Any = RunConfig
    table: type[BaseModel] = RunConfig
    for part in location:
        kinds = {"fleet": _FLEETS, "learner": _LEARNERS}.get(".".join(path), {})
        if part in kinds and model not in kinds.values():
            model = kinds[str(part)]  # which one was meant; not a key
            continue
        path.append(str(part))
        if _is_model(model):
            table = model
        field = model.model_fields.get(part) if _is_model(model) else None
        model = field.annotation if field is not None else None
    return path, table


def _is_model(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)


_Json = Any


def _without_none(value: _Json) -> _Json:
    """TOML has no null: a missing key means the default, which is None wherever None is allowed."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
