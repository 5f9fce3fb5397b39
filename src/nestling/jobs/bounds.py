"""Every `[prime_rl]` key a job may set: type, bounds, default, rl.toml path and meaning.

This one table drives the manifest parser, the agent's prompt, the documentation, the editor
schema and the rl.toml writer, so that none of them can disagree. Names, meanings and defaults
follow prime-rl 0.8.0 (commit 559b447) unless the meaning says otherwise; the bounds are ours.
Three scales share the mechanism: `small` (our own trainer, the shipped models), `open` (our own trainer,
open models of the hub's layouts) and `large` (prime-rl). Only `open` has an `[sft]` table: a warm-up on
worked examples before the training itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

__all__ = [
    "LARGE",
    "MAX_ROLLOUTS",
    "OPEN",
    "SMALL",
    "Bounds",
    "Key",
    "Kind",
    "Scale",
    "bounds_line",
    "bounds_table_markdown",
    "manifest_json_schema",
    "number",
]

Kind = Literal["int", "float", "bool", "choice"]
Scale = Literal["small", "open", "large"]
Value = int | float | bool | str

MAX_ROLLOUTS = 1024
"""Cap on `max_steps * batch_size` of a small job; keeps the whole job under a minute of one core."""

_More = Any
"""Further fields of `Key`."""

_SOURCE = "orchestrator.train.source[0]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One `[prime_rl]` key."""

    name: str
    kind: Kind
    default: Value
    path: str
    """Dotted place in prime-rl's rl.toml."""
    meaning: str
    """One line, for people and agents."""
    low: float | None = None
    high: float | None = None
    """Inclusive limits of an int or float."""
    choices: tuple[str, ...] = ()
    only_with: tuple[str, tuple[str, ...]] | None = None
    """Selector key and the values of it under which this key means something."""
    main: bool = False
    """Shown in the one-line summary."""

    def limits(self) -> str:
        """What may be written, for example `1e-05..0.003` or `adamw|sgd`."""
        if self.kind == "choice":
            return "|".join(self.choices)
        if self.kind == "bool":
            return "true|false"
        return f"{number(self.low)}..{number(self.high)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The table for one scale of models."""

    scale: Scale
    keys: tuple[Key, ...]
    base_models: tuple[str, ...]
    max_rollouts: int
    """Cap on `max_steps * batch_size`."""
    sft: tuple[Key, ...] = ()
    """Keys of the `[sft]` table; none where there is no such table."""

    def get(self, name: str) -> Key | None:
        """The key of that name, or None."""
        return next((key for key in self.keys if key.name == name), None)

    def table(self, name: str) -> tuple[Key, ...]:
        """Keys of a table of job.toml, `prime_rl` or `sft`."""
        return self.sft if name == "sft" else self.keys

    def names(self) -> tuple[str, ...]:
        """All key names in table order."""
        return tuple(key.name for key in self.keys)

    def defaults(self) -> dict[str, Value]:
        """Default value of every key."""
        return {key.name: key.default for key in self.keys}


def number(value: float | None) -> str:
    """A number the way the tables print it: 3e-3, 0.5, 16."""
    if value is None:
        return ""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if abs(value) < 0.01:
        mantissa, exponent = f"{value:.10e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}"


def _int(
    name: str, default: int, low: int, high: int, path: str, meaning: str, **more: _More
) -> Key:
    return Key(
        name=name,
        kind="int",
        default=default,
        low=low,
        high=high,
        path=path,
        meaning=meaning,
        **more,
    )


def _float(
    name: str, default: float, limits: tuple[float, float], path: str, meaning: str, **more: _More
) -> Key:
    low, high = limits
    return Key(
        name=name,
        kind="float",
        default=default,
        low=low,
        high=high,
        path=path,
        meaning=meaning,
        **more,
    )


def _choice(name: str, choices: tuple[str, ...], path: str, meaning: str, **more: _More) -> Key:
    return Key(
        name=name,
        kind="choice",
        default=choices[0],
        choices=choices,
        path=path,
        meaning=meaning,
        **more,
    )


def _bool(name: str, path: str, meaning: str, **more: _More) -> Key:
    return Key(name=name, kind="bool", default=False, path=path, meaning=meaning, **more)


_ADAM = ("optimizer", ("adamw", "muon"))
_DECAYING = ("scheduler", ("linear", "cosine"))
_LORA = ("lora_rank", ("1 or more",))

_SMALL_KEYS: tuple[Key, ...] = (
    _float(
        "lr",
        1e-5,
        (1e-5, 3e-3),
        "trainer.optim.lr",
        "Peak learning rate. Too high destroys the model, too low changes nothing.",
        main=True,
    ),
    _int("max_steps", 8, 1, 16, "max_steps", "Training steps.", main=True),
    _int(
        "batch_size",
        64,
        16,
        256,
        "orchestrator.batch_size",
        "Rollouts per step; a multiple of group_size.",
        main=True,
    ),
    _int(
        "group_size",
        8,
        2,
        16,
        "orchestrator.group_size",
        "Rollouts of the same row; advantages compare within a group. prime-rl's own default is 1.",
        main=True,
    ),
    _float(
        "temperature",
        1.0,
        (0.5, 1.5),
        "orchestrator.train.sampling.temperature",
        "Sampling temperature of training rollouts.",
        main=True,
    ),
    _choice(
        "optimizer",
        ("adamw", "sgd", "muon", "sign_sgd"),
        "trainer.optim.type",
        "Update rule.",
        main=True,
    ),
    _float(
        "weight_decay",
        0.01,
        (0.0, 1.0),
        "trainer.optim.weight_decay",
        "Decoupled weight decay, multiplied by the learning rate.",
    ),
    _float(
        "max_norm",
        1.0,
        (0.01, 100.0),
        "trainer.optim.max_norm",
        "The gradient is scaled down to this norm.",
    ),
    _float(
        "betas1",
        0.9,
        (0.0, 0.9999),
        "trainer.optim.betas1",
        "Decay of the first moment (muon: of its adamw part).",
        only_with=_ADAM,
    ),
    _float(
        "betas2",
        0.999,
        (0.0, 0.9999),
        "trainer.optim.betas2",
        "Decay of the second moment (muon: of its adamw part, default 0.95).",
        only_with=_ADAM,
    ),
    _float(
        "momentum",
        0.9,
        (0.0, 0.999),
        "trainer.optim.momentum",
        "Momentum of sgd.",
        only_with=("optimizer", ("sgd",)),
    ),
    _float(
        "mu",
        0.95,
        (0.0, 0.999),
        "trainer.optim.mu",
        "Momentum of muon.",
        only_with=("optimizer", ("muon",)),
    ),
    _choice(
        "scheduler",
        ("constant", "linear", "cosine"),
        "trainer.scheduler.type",
        "Course of the learning rate after the warm-up.",
    ),
    _int(
        "warmup_steps",
        0,
        0,
        15,
        "trainer.scheduler.warmup_steps",
        "Steps of linear warm-up; fewer than max_steps. prime-rl's own default is 10.",
        only_with=_DECAYING,
    ),
    _int(
        "decay_steps",
        0,
        0,
        16,
        "trainer.scheduler.decay_steps",
        "Last steps over which linear decays to min_lr; unset: all steps after the warm-up.",
        only_with=("scheduler", ("linear",)),
    ),
    _float(
        "min_lr",
        0.0,
        (0.0, 3e-3),
        "trainer.scheduler.min_lr",
        "Learning rate at the end of the decay; not above lr.",
        only_with=_DECAYING,
    ),
    _choice(
        "loss",
        ("default", "ipo"),
        "trainer.loss.type",
        "default: importance-weighted policy gradient with probability-gap masks; ipo: one masking threshold.",
    ),
    _float(
        "kl_tau",
        1e-3,
        (0.0, 1.0),
        "trainer.loss.kl_tau",
        "Weight of the squared log-ratio between learner and sampler.",
    ),
    _float(
        "adv_tau", 1.0, (0.0, 10.0), "trainer.loss.adv_tau", "Weight of the advantage in the loss."
    ),
    _float(
        "dppo_mask_low",
        0.2,
        (0.0, 1.0),
        "trainer.loss.dppo_mask_low",
        "Tokens whose probability fell by more than this are masked.",
        only_with=("loss", ("default",)),
    ),
    _float(
        "dppo_mask_high",
        0.2,
        (0.0, 1.0),
        "trainer.loss.dppo_mask_high",
        "Tokens whose probability rose by more than this are masked.",
        only_with=("loss", ("default",)),
    ),
    _float(
        "ipo_threshold",
        0.1,
        (0.0, 1.0),
        "trainer.loss.ipo_threshold",
        "Tokens whose probability moved by more than this are masked.",
        only_with=("loss", ("ipo",)),
    ),
    _choice(
        "algo",
        ("grpo", "max_rl", "echo", "rae"),
        "orchestrator.algo.type",
        "grpo: reward minus group mean; max_rl: that, divided by the group mean; echo: grpo plus"
        " cross-entropy on tool replies; rae: reward minus a moving average.",
    ),
    _bool(
        "length_penalty",
        "orchestrator.algo.length_penalty",
        "Before the baseline, take from each reward group mean * (0.25 output tokens + 0.1 input tokens"
        " + 0.1 turns), each relative to the largest in the group.",
        only_with=("algo", ("grpo", "echo")),
    ),
    _int(
        "max_tokens",
        64,
        16,
        128,
        "orchestrator.train.sampling.max_completion_tokens",
        "Sampled tokens per turn at most.",
    ),
    _int(
        "max_turns",
        24,
        1,
        32,
        f"{_SOURCE}.env.agent.max_turns",
        "Turns of the model per rollout at most.",
    ),
    _int(
        "seq_len",
        512,
        128,
        1024,
        "seq_len",
        "Tokens per rollout at most, prompt and tool results included; a longer rollout ends there.",
    ),
    _int(
        "lora_rank",
        0,
        0,
        64,
        "trainer.model.lora.rank",
        "Rank of the trained low-rank update; 0 trains all weights.",
    ),
    _float(
        "lora_alpha",
        32.0,
        (0.0, 256.0),
        "trainer.model.lora.alpha",
        "The low-rank update is scaled by lora_alpha / lora_rank.",
        only_with=_LORA,
    ),
    _float(
        "lora_dropout",
        0.0,
        (0.0, 0.5),
        "trainer.model.lora.dropout",
        "Dropout before the low-rank update.",
        only_with=_LORA,
    ),
    _int(
        "max_off_policy_steps",
        8,
        0,
        16,
        "orchestrator.max_off_policy_steps",
        "Oldest weights a rollout may come from. No effect on small models: they train strictly"
        " on-policy, which any limit allows.",
    ),
    _choice(
        "sampler",
        ("standard", "difficulty_pool"),
        f"{_SOURCE}.curriculum.sampler.type",
        "standard: rows in order, again from the start; difficulty_pool: rows that are neither always"
        " nor never solved come more often.",
    ),
    _bool(
        "enable_thinking",
        "orchestrator.renderer.enable_thinking",
        "Thinking mode of the chat template. No effect on small models: their template has none.",
    ),
)

_LARGE_CHANGES: dict[str, dict[str, Any]] = {
    "max_steps": {"default": 20, "high": 100},
    "batch_size": {"high": 512},
    "group_size": {"high": 32},
    "lr": {"default": 1e-6, "low": 1e-7, "high": 1e-3},
    "temperature": {"low": 0.2},
    "warmup_steps": {"high": 99},
    "decay_steps": {"high": 100},
    "min_lr": {"high": 1e-3},
    "max_tokens": {"default": 256, "high": 2048},
    "max_turns": {"default": 12},
    "seq_len": {"default": 2048, "low": 512, "high": 8192},
    "lora_rank": {"default": 16},
    "max_off_policy_steps": {"meaning": "Oldest weights a rollout may come from."},
    "enable_thinking": {"meaning": "Thinking mode of the chat template."},
}

SMALL = Bounds(
    scale="small",
    keys=_SMALL_KEYS,
    base_models=("nano", "micro"),
    max_rollouts=MAX_ROLLOUTS,
)
"""For the models this package ships and trains itself."""

LARGE = Bounds(
    scale="large",
    keys=tuple(replace(key, **_LARGE_CHANGES.get(key.name, {})) for key in _SMALL_KEYS),
    base_models=("smollm2-135m", "gemma3-270m", "qwen3-0.6b", "qwen3-1.7b"),
    max_rollouts=25_600,
)
"""For models trained by prime-rl."""

_OPEN_CHANGES: dict[str, dict[str, Any]] = {
    "lr": {"default": 1e-4, "low": 1e-6, "high": 1e-3},
    "min_lr": {"high": 1e-3},
    "max_steps": {"high": 32},
    "max_tokens": {"default": 96, "high": 256},
    "seq_len": {"default": 1024, "low": 256, "high": 2048},
    "lora_rank": {"default": 16},
}

_SFT_KEYS: tuple[Key, ...] = (
    _int(
        "steps", 16, 1, 64, "sft.steps", "Supervised steps before the training itself.", main=True
    ),
    _int("rows", 16, 1, 64, "sft.rows", "Worked examples per step.", main=True),
    _float(
        "lr",
        2e-4,
        (1e-6, 1e-3),
        "sft.lr",
        "Peak learning rate; falls to 0 over the steps.",
        main=True,
    ),
    _choice(
        "source",
        ("dev", "rows"),
        "sft.source",
        "dev: the family's public dev examples, worked by its own solver; rows: rows of the job's data set"
        " whose data has `turns`, the model's turns as text, played against the job's own tools.",
        main=True,
    ),
)

OPEN = Bounds(
    scale="open",
    keys=tuple(replace(key, **_OPEN_CHANGES.get(key.name, {})) for key in _SMALL_KEYS),
    base_models=("smollm2-135m", "gemma3-270m"),
    max_rollouts=2560,
    sft=_SFT_KEYS,
)
"""For open models trained by this package; a recipe puts its own base models in."""


def bounds_line(bounds: Bounds = SMALL) -> str:
    """The main keys and the cross rules in one line, for an agent's prompt."""
    keys = ", ".join(f"{key.name} {key.limits()}" for key in bounds.keys if key.main)
    sft = ", ".join(f"{key.name} {key.limits()}" for key in bounds.sft if key.main)
    warm_up = f"optional [sft] {sft}; " if sft else ""
    return (
        f"job.toml: base_model {'|'.join(bounds.base_models)}; [prime_rl] {keys}; {warm_up}"
        f"max_steps*batch_size <= {bounds.max_rollouts}; group_size divides batch_size."
    )


def bounds_table_markdown(bounds: Bounds = SMALL) -> str:
    """All keys as a Markdown table, followed by the rules that join several keys."""
    lines = _table_lines(bounds.keys)
    if bounds.sft:
        lines += [
            "",
            "`[sft]`, an optional warm-up; with the table, every key has its default:",
            "",
        ]
        lines += _table_lines(bounds.sft)
    lines += [
        "",
        f"- `base_model` is one of {', '.join(bounds.base_models)}.",
        f"- `max_steps * batch_size` is at most {bounds.max_rollouts}.",
        "- `group_size` divides `batch_size`.",
        "- With cosine, `warmup_steps` is below `max_steps`; with linear,"
        " `warmup_steps + decay_steps` is 1 to `max_steps`.",
        "- `min_lr` is not above `lr`.",
    ]
    return "\n".join(lines)


def _table_lines(keys: tuple[Key, ...]) -> list[str]:
    lines = ["| key | allowed | default | meaning |", "| --- | --- | --- | --- |"]
    for key in keys:
        meaning = key.meaning
        if key.only_with is not None:
            selector, values = key.only_with
            meaning += f" Only with {selector} {' or '.join(values)}."
        allowed = key.limits().replace("|", ", ")
        lines.append(f"| `{key.name}` | {allowed} | {_shown(key.default)} | {meaning} |")
    return lines


def manifest_json_schema(bounds: Bounds = SMALL) -> dict[str, Any]:
    """JSON Schema (2020-12) of `job.toml`, for editors; it cannot express the joint rules."""
    tables = {
        name: {
            "type": "object",
            "additionalProperties": False,
            "properties": {key.name: _key_schema(key) for key in bounds.table(name)},
        }
        for name in (("prime_rl", "sft") if bounds.sft else ("prime_rl",))
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "job.toml",
        "type": "object",
        "additionalProperties": False,
        "required": ["base_model"],
        "properties": {
            "base_model": {"enum": list(bounds.base_models)},
            **tables,
            "env": {
                "type": "object",
                "additionalProperties": {"type": ["string", "number", "boolean"]},
            },
        },
    }


def _key_schema(key: Key) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": key.meaning, "default": key.default}
    if key.kind == "choice":
        return schema | {"enum": list(key.choices)}
    if key.kind == "bool":
        return schema | {"type": "boolean"}
    kind = "integer" if key.kind == "int" else "number"
    return schema | {"type": kind, "minimum": key.low, "maximum": key.high}


def _shown(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else number(value)
