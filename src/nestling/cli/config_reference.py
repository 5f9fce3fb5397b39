"""The recipe's keys as a page and as a JSON Schema, both made from the models that enforce them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from nestling.config import RunConfig

__all__ = ["recipe_reference", "recipe_schema"]

_HEAD: Final = """# Recipe reference

Every key of a recipe, with its type, default and meaning. This page is written by `nestling schema recipe --markdown`.
A key is set in the TOML file under its table or on the command line as `--set table.key=VALUE`; unknown keys are errors
that name the nearest known one. The resolved recipe lies in the run folder as `config.toml`.
"""


def recipe_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a recipe, for editors."""
    schema = RunConfig.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def recipe_reference() -> str:
    """The page as Markdown."""
    parts = [_HEAD, *_tables(RunConfig, "", "top level")]
    return "\n".join(parts).rstrip() + "\n"


def _tables(model: type[BaseModel], path: str, title: str) -> Iterator[str]:
    """One table of plain keys, then the tables inside it and the lists of tables."""
    plain = {name: field for name, field in model.model_fields.items() if not _models(field)}
    if plain or not path:
        yield f"## {title}\n"
        if model.__doc__:
            yield f"{_line(model.__doc__)}\n"
        yield "| key | type | default | meaning |\n| --- | --- | --- | --- |"
        for name, field in plain.items():
            yield _row(f"{path}{name}", field)
        yield ""
    for name, field in model.model_fields.items():
        kinds = _models(field)
        for kind in kinds:
            word = _kind_word(kind)
            which = f' with `kind = "{word}"`' if len(kinds) > 1 and word else ""
            yield from _tables(kind, f"{path}{name}.", f"`[{path}{name}]`{which}")
        for kind in _listed(field.annotation):
            yield from _tables(kind, f"{path}{name}.", f"`[[{path}{name}]]`, each")


def _row(path: str, field: FieldInfo) -> str:
    meaning = field.description or ("Chooses this table." if path.endswith(".kind") else "")
    return f"| `{path}` | {_type(field)} | {_default(field)} | {_line(meaning)} |"


def _models(field: FieldInfo) -> list[type[BaseModel]]:
    """Models that the field itself is one of; a list of models is a plain key."""
    return list(_leaves(field.annotation))


def _leaves(annotation: Any) -> Iterator[type[BaseModel]]:  # noqa: ANN401 (any annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    origin = getattr(annotation, "__origin__", None)
    if origin in (tuple, list, dict):
        return
    for part in get_args(annotation):
        yield from _leaves(part)


def _listed(annotation: Any) -> Iterator[type[BaseModel]]:  # noqa: ANN401 (any annotation)
    """Models of which the field holds a list."""
    parts = get_args(annotation)
    if getattr(annotation, "__origin__", None) in (tuple, list):
        for part in parts:
            yield from _leaves(part)
    elif parts:
        for part in parts:
            yield from _listed(part)


def _kind_word(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("kind")
    return None if field is None else str(field.default)


def _type(field: FieldInfo) -> str:
    annotation = field.annotation
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    for word in ("typing.", "nestling.", "pathlib."):
        text = text.replace(word, "")
    bounds = [part for one in field.metadata if (part := _bound(one))]
    shown = f"`{text}`" + (f" {', '.join(bounds)}" if bounds else "")
    return shown.replace("|", "\\|")


def _bound(rule: object) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "pattern": "matches"}
    found = [(sign, getattr(rule, name, None)) for name, sign in signs.items()]
    return ", ".join(
        f"{sign} `{value}`" if sign == "matches" else f"{sign} {value}"
        for sign, value in found
        if value is not None
    )


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    text = json.dumps(value, default=str)
    return f"`{text}`".replace("|", "\\|")


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
