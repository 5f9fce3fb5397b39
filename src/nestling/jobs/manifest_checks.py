"""What can be wrong with single entries of `job.toml`, and how to say it.

Every message fits a small agent: the value as written, the limits, one edit that repairs it.
"""

from __future__ import annotations

import difflib
import math
import re
from typing import Any, Literal

from nestling.core.errors import Problem
from nestling.jobs.bounds import Bounds, Key, number

__all__ = [
    "Scalar",
    "base_model_problem",
    "nearest_name",
    "read_env",
    "read_settings",
    "schema_problem",
    "shown",
    "syntax_problem",
    "toml_value",
    "top_level_problems",
]

TableName = Literal["prime_rl", "sft"]
Scalar = str | int | float | bool
"""A value that `[prime_rl]` and `[env]` may hold."""

_MAX_ENV_KEYS = 16
_MAX_ENV_TEXT = 200
_RESERVED_ENV = frozenset({"id", "task", "env"})
_IDENTIFIER = re.compile(r"[a-z][a-z0-9_]{0,39}")
_MAX_INT = 2**53

_WANTED = {
    "int": "an integer",
    "float": "a number",
    "bool": "a truth value",
    "choice": "a string",
}
_ESCAPES = {"\\": "\\\\", '"': '\\"'}

_SYNONYMS = {
    "learning_rate": "lr",
    "learningrate": "lr",
    "step_size": "lr",
    "steps": "max_steps",
    "num_steps": "max_steps",
    "train_steps": "max_steps",
    "total_steps": "max_steps",
    "epochs": "max_steps",
    "batch": "batch_size",
    "train_batch_size": "batch_size",
    "rollouts_per_step": "batch_size",
    "group": "group_size",
    "num_generations": "group_size",
    "rollouts_per_example": "group_size",
    "temp": "temperature",
    "optim": "optimizer",
    "optimiser": "optimizer",
    "lr_scheduler": "scheduler",
    "schedule": "scheduler",
    "warmup": "warmup_steps",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_grad_norm": "max_norm",
    "grad_clip": "max_norm",
    "clip": "max_norm",
    "rank": "lora_rank",
    "lora_r": "lora_rank",
    "alpha": "lora_alpha",
    "beta1": "betas1",
    "beta2": "betas2",
    "kl_coef": "kl_tau",
    "algorithm": "algo",
    "max_length": "seq_len",
    "model": "base_model",
    "model_name": "base_model",
    "base": "base_model",
}
"""What people write instead of our names."""


def top_level_problems(document: dict[str, Any], bounds: Bounds) -> list[Problem]:
    """Keys other than base_model and the tables of this scale."""
    problems = []
    known = ("base_model", "prime_rl", *(("sft",) if bounds.sft else ()), "env")
    for name in document:
        if name in known:
            continue
        nearest = nearest_name(name, (*bounds.names(), *known))
        if nearest in bounds.names():
            fix = f"write {nearest} below a [prime_rl] line"
        elif nearest is not None:
            fix = f"write {nearest}"
        else:
            fix = "remove it"
        problems.append(
            schema_problem(
                "unknown_key",
                f"unknown top-level key {shown(name)}",
                ", ".join(name if name == "base_model" else f"[{name}]" for name in known),
                fix,
            )
        )
    return problems


def base_model_problem(document: dict[str, Any], bounds: Bounds) -> Problem | None:
    """A missing or unknown base model."""
    choices = "|".join(bounds.base_models)
    if "base_model" not in document:
        return schema_problem(
            "missing_base_model",
            "base_model is missing",
            f"base_model = {choices}",
            "write it on the first line, above [prime_rl]",
        )
    value = document["base_model"]
    if not isinstance(value, str) or value not in bounds.base_models:
        nearest = nearest_name(value, bounds.base_models) if isinstance(value, str) else None
        return schema_problem(
            "unknown_base_model",
            f"base_model {shown(value)} is unknown",
            choices,
            f'write base_model = "{nearest}"' if nearest else "choose one of them",
        )
    return None


def read_settings(
    entries: object, bounds: Bounds, *, table: TableName = "prime_rl"
) -> tuple[dict[str, Scalar], list[Problem]]:
    """The valid entries of [prime_rl] or [sft], and a problem for each of the others."""
    keys = {key.name: key for key in bounds.table(table)}
    if not keys:
        return {}, []  # that there is such a table is a problem of the top level
    if not isinstance(entries, dict):
        return {}, [
            schema_problem(
                "wrong_type", f"{table} is not a table", f"a [{table}] line", f"write [{table}]"
            )
        ]
    given: dict[str, Scalar] = {}
    problems = []
    for name, value in entries.items():
        key = keys.get(name)
        if key is None:
            problems.append(_unknown_key(name, table, tuple(keys)))
            continue
        problem = _value_problem(key, value)
        if problem is not None:
            problems.append(problem)
        else:
            given[name] = float(value) if key.kind == "float" else value
    return given, problems


def _unknown_key(name: str, table: TableName, keys: tuple[str, ...]) -> Problem:
    nearest = nearest_name(name, (*keys, "base_model"))
    if nearest == "base_model":
        fix = "write base_model on the first line, above [prime_rl]"
    else:
        fix = f"write {nearest}" if nearest else "remove it"
    return schema_problem(
        "unknown_key",
        f"unknown key {shown(name)} in [{table}]",
        "a key of the table in INSTRUCTIONS.md",
        fix,
    )


def _value_problem(key: Key, value: object) -> Problem | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    right_type = {
        "int": is_number and isinstance(value, int),
        "float": is_number,
        "bool": isinstance(value, bool),
        "choice": isinstance(value, str),
    }[key.kind]
    if not right_type:
        example = f'"{key.default}"' if key.kind == "choice" else toml_value(key.default)
        return schema_problem(
            "wrong_type",
            f"{key.name} = {shown(value)} has the wrong type",
            f"{_WANTED[key.kind]}, {key.limits()}",
            f"for example {key.name} = {example}",
        )
    if isinstance(value, str) and value not in key.choices:
        nearest = nearest_name(value, key.choices)
        fix = f'write {key.name} = "{nearest or key.choices[0]}"'
        return schema_problem(
            "unknown_choice", f"{key.name} = {shown(value)} is unknown", key.limits(), fix
        )
    if isinstance(value, int | float) and is_number:
        return _range_problem(key, value)
    return None


def _range_problem(key: Key, value: float) -> Problem | None:
    assert key.low is not None
    assert key.high is not None
    if key.low <= value <= key.high:
        return None
    return schema_problem(
        "out_of_bounds",
        f"{key.name} {shown(value)} is out of bounds",
        key.limits(),
        f"for example {key.name} = {number(float(key.default))}",
    )


def read_env(table: object) -> tuple[dict[str, Scalar], list[Problem]]:
    """The entries of [env], and a problem for each that cannot be used."""
    if not isinstance(table, dict):
        return {}, [
            schema_problem("wrong_type", "env is not a table", "an [env] line", "write [env]")
        ]
    problems = []
    if len(table) > _MAX_ENV_KEYS:
        problems.append(
            schema_problem(
                "env_too_large",
                f"[env] has {len(table)} keys",
                f"at most {_MAX_ENV_KEYS}",
                "remove some",
            )
        )
    for name, value in table.items():
        if not _IDENTIFIER.fullmatch(name) or name in _RESERVED_ENV:
            problems.append(
                schema_problem(
                    "env_name",
                    f"[env] key {shown(name)} cannot be used",
                    "a field name of your taskset config",
                    "rename it (not id, task, env)",
                )
            )
        elif not _is_env_value(value):
            problems.append(
                schema_problem(
                    "env_value",
                    f"[env] {name} = {shown(value)} cannot be used",
                    f"a finite number, true|false or one line of text, at most {_MAX_ENV_TEXT}",
                    "give a plain value",
                )
            )
    return dict(table), problems


def _is_env_value(value: object) -> bool:
    if isinstance(value, bool):
        return True
    if isinstance(value, int):
        return abs(value) <= _MAX_INT
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str) and len(value) <= _MAX_ENV_TEXT and value.isprintable()


def syntax_problem(error: Exception) -> Problem:
    """What a failed TOML parse means, with the line."""
    if isinstance(error, RecursionError):
        what = "it is nested too deeply"
    else:
        what = str(error).replace("\n", " ")[:60]
    return schema_problem(
        "toml_syntax",
        f"job.toml is not TOML: {what}",
        'lines like lr = 1e-3 or optimizer = "adamw"',
        "correct that line",
    )


def schema_problem(code: str, wrong: str, expected: str, fix: str) -> Problem:
    """A problem of the schema stage."""
    return Problem(stage="schema", code=f"schema.{code}", wrong=wrong, expected=expected, fix=fix)


def nearest_name(name: str, choices: tuple[str, ...]) -> str | None:
    """The intended name: a known synonym, a case variant, or a near spelling."""
    folded = name[:64].lower().replace("-", "_")
    synonym = _SYNONYMS.get(folded)
    if synonym in choices:
        return synonym
    return next(iter(difflib.get_close_matches(folded, choices, n=1, cutoff=0.7)), None)


def shown(value: object) -> str:
    """A value as the job wrote it, cut to what a message can hold."""
    text = (
        value
        if isinstance(value, str)
        else toml_value(value)
        if isinstance(value, Scalar)
        else type(value).__name__
    )
    text = "".join(c if c.isprintable() else "?" for c in text[:40])
    return text if len(text) <= 30 else text[:27] + "..."


def toml_value(value: object) -> str:
    """A scalar as TOML text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        return str(value)
    assert isinstance(value, str)
    escaped = "".join(_ESCAPES.get(c, c) if c.isprintable() else f"\\U{ord(c):08x}" for c in value)
    return f'"{escaped}"'
