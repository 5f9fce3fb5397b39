"""`job.toml`: which base model, which training settings, which environment arguments.

Parsing collects every problem instead of the first, because an agent has few attempts. Nothing is
coerced except an integer where a float is allowed.
"""

from __future__ import annotations

import tomllib
from typing import Any, Literal

from pydantic import Field

from nestling.core.errors import JobRejectedError, Problem
from nestling.core.frozen import Frozen
from nestling.jobs.bounds import SMALL, Bounds, number
from nestling.jobs.manifest_checks import (
    Scalar,
    base_model_problem,
    read_env,
    read_settings,
    schema_problem,
    syntax_problem,
    toml_value,
    top_level_problems,
)

__all__ = ["JobManifest", "PrimeRl", "Sft", "parse_manifest", "render_manifest"]

_MAX_BYTES = 16_384


class PrimeRl(Frozen):
    """The resolved `[prime_rl]` table: a value for every key; see `bounds` for meanings."""

    max_steps: int
    batch_size: int
    group_size: int
    lr: float
    temperature: float
    optimizer: Literal["adamw", "sgd", "muon", "sign_sgd"]
    weight_decay: float
    max_norm: float
    betas1: float
    betas2: float
    momentum: float
    mu: float
    scheduler: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    decay_steps: int
    min_lr: float
    loss: Literal["default", "ipo"]
    kl_tau: float
    adv_tau: float
    dppo_mask_low: float
    dppo_mask_high: float
    ipo_threshold: float
    algo: Literal["grpo", "max_rl", "echo", "rae"]
    length_penalty: bool
    max_tokens: int
    max_turns: int
    seq_len: int
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    max_off_policy_steps: int
    sampler: Literal["standard", "difficulty_pool"]
    enable_thinking: bool

    @classmethod
    def resolve(cls, given: dict[str, Scalar], bounds: Bounds = SMALL) -> PrimeRl:
        """Fill in the defaults of the scale and those that depend on other keys."""
        values: dict[str, Any] = bounds.defaults() | given
        if values["optimizer"] == "muon" and "betas2" not in given:
            values["betas2"] = 0.95
        if values["scheduler"] == "linear" and "decay_steps" not in given:
            values["decay_steps"] = max(0, values["max_steps"] - values["warmup_steps"])
        return cls.model_validate(values)


class Sft(Frozen):
    """The resolved `[sft]` table; see `bounds` for meanings."""

    steps: int
    rows: int
    lr: float
    source: Literal["dev", "rows"]


class JobManifest(Frozen):
    """A parsed `job.toml`."""

    base_model: str
    prime_rl: PrimeRl
    env: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Arguments of the job's taskset."""
    explicit_keys: tuple[str, ...] = ()
    """The `[prime_rl]` keys the job set itself, in table order."""
    sft: Sft | None = None
    """None: no warm-up."""

    @classmethod
    def build(
        cls,
        base_model: str,
        *,
        env: dict[str, Scalar] | None = None,
        sft: dict[str, Scalar] | None = None,
        bounds: Bounds = SMALL,
        **prime_rl: Scalar,
    ) -> JobManifest:
        """A manifest from values; raises `JobRejectedError` like a parsed one."""
        document = {"base_model": base_model, "prime_rl": prime_rl, "env": env or {}}
        return _checked(document if sft is None else document | {"sft": sft}, bounds)


def parse_manifest(text: str | bytes, bounds: Bounds = SMALL) -> JobManifest:
    """Read `job.toml`; raises `JobRejectedError` with every problem found."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(data) > _MAX_BYTES:
        raise JobRejectedError(
            [
                schema_problem(
                    "too_large",
                    f"job.toml has {len(data)} bytes",
                    f"at most {_MAX_BYTES}",
                    "keep only base_model, [prime_rl] and [env]",
                )
            ]
        )
    try:
        decoded = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JobRejectedError(
            [
                schema_problem(
                    "not_utf8",
                    f"job.toml is not UTF-8 at byte {error.start}",
                    "UTF-8 text",
                    "write the file again as plain text",
                )
            ]
        ) from error
    try:
        document = tomllib.loads(decoded)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise JobRejectedError([syntax_problem(error)]) from error
    return _checked(document, bounds)


def render_manifest(manifest: JobManifest) -> str:
    """`job.toml` text with the keys the job set itself; parsing it gives the manifest back."""
    lines = [f"base_model = {toml_value(manifest.base_model)}", "", "[prime_rl]"]
    lines += [
        f"{name} = {toml_value(getattr(manifest.prime_rl, name))}"
        for name in manifest.explicit_keys
    ]
    if manifest.sft is not None:
        lines += ["", "[sft]"]
        lines += [
            f"{key} = {toml_value(value)}" for key, value in manifest.sft.model_dump().items()
        ]
    if manifest.env:
        lines += ["", "[env]"]
        lines += [f"{name} = {toml_value(value)}" for name, value in manifest.env.items()]
    return "\n".join(lines) + "\n"


def _checked(document: dict[str, Any], bounds: Bounds) -> JobManifest:
    problems = top_level_problems(document, bounds)
    base_problem = base_model_problem(document, bounds)
    if base_problem is not None:
        problems.append(base_problem)
    given, table_problems = read_settings(document.get("prime_rl", {}), bounds)
    sft, sft_problems = read_settings(document.get("sft", {}), bounds, table="sft")
    env, env_problems = read_env(document.get("env", {}))
    problems += table_problems + sft_problems + env_problems
    if not problems:
        problems = _joint_problems(given, bounds)
    if problems:
        raise JobRejectedError(problems)
    return JobManifest(
        base_model=document["base_model"],
        prime_rl=PrimeRl.resolve(given, bounds),
        env=env,
        explicit_keys=tuple(name for name in bounds.names() if name in given),
        sft=_warm_up(sft, bounds) if "sft" in document else None,
    )


def _warm_up(given: dict[str, Scalar], bounds: Bounds) -> Sft:
    return Sft.model_validate({key.name: key.default for key in bounds.sft} | given)


def _joint_problems(given: dict[str, Scalar], bounds: Bounds) -> list[Problem]:
    values = PrimeRl.resolve(given, bounds)
    problems = [
        problem
        for name in given
        if (problem := _misplaced(name, given, values, bounds)) is not None
    ]
    if values.batch_size % values.group_size:
        divisors = [
            g
            for g in range(2, 33)
            if values.batch_size % g == 0 and _allowed("group_size", g, bounds)
        ]
        nearest = min(divisors, key=lambda g: abs(g - values.group_size), default=2)
        problems.append(
            schema_problem(
                "group_size",
                f"group_size {values.group_size} does not divide batch_size {values.batch_size}",
                "batch_size to be a multiple of group_size",
                f"for example group_size = {nearest}",
            )
        )
    rollouts = values.max_steps * values.batch_size
    if rollouts > bounds.max_rollouts:
        problems.append(
            Problem(
                stage="budget",
                code="budget.rollouts",
                wrong=f"max_steps*batch_size is {values.max_steps}*{values.batch_size} = {rollouts}",
                expected=f"at most {bounds.max_rollouts}",
                fix=f"for example max_steps = {max(1, bounds.max_rollouts // values.batch_size)}",
            )
        )
    return problems + _schedule_problems(values)


def _misplaced(
    name: str, given: dict[str, Scalar], values: PrimeRl, bounds: Bounds
) -> Problem | None:
    """A key that means nothing beside the chosen optimizer, scheduler, loss, algo or rank."""
    key = bounds.get(name)
    if key is None or key.only_with is None or given[name] == key.default:
        return None
    selector, wanted = key.only_with
    chosen = getattr(values, selector)
    if (chosen > 0) if selector == "lora_rank" else (chosen in wanted):
        return None
    other = f"{selector} = 8" if selector == "lora_rank" else f'{selector} = "{wanted[0]}"'
    return schema_problem(
        "no_effect",
        f"{name} has no effect with {selector} {chosen}",
        f"{selector} {' or '.join(wanted)}",
        f"remove {name} or set {other}",
    )


def _schedule_problems(values: PrimeRl) -> list[Problem]:
    problems = []
    warmup, decay, steps = values.warmup_steps, values.decay_steps, values.max_steps
    if values.scheduler == "constant":
        return []
    if warmup >= steps:
        problems.append(
            schema_problem(
                "warmup",
                f"warmup_steps {warmup} is not below max_steps {steps}",
                f"0..{steps - 1}",
                f"for example warmup_steps = {min(2, steps - 1)}",
            )
        )
    elif values.scheduler == "linear" and not 1 <= warmup + decay <= steps:
        problems.append(
            schema_problem(
                "decay",
                f"warmup_steps + decay_steps is {warmup + decay}",
                f"1..{steps} (max_steps)",
                f"for example decay_steps = {steps - warmup}, or remove it",
            )
        )
    if values.min_lr > values.lr:
        lr = number(values.lr)
        problems.append(
            schema_problem(
                "min_lr",
                f"min_lr {number(values.min_lr)} is above lr {lr}",
                f"0..{lr}",
                "lower min_lr",
            )
        )
    return problems


def _allowed(name: str, value: float, bounds: Bounds) -> bool:
    key = bounds.get(name)
    assert key is not None
    assert key.low is not None
    assert key.high is not None
    return key.low <= value <= key.high
