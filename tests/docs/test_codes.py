"""docs/troubleshooting.md has a line for every code that the source can give."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from nestling.agent.episode_result import OutcomeCode
from nestling.jobs.outcome import OutcomeStatus

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/troubleshooting.md"
PACKAGES = ("agent", "bench", "dash", "engine", "fleet", "inner", "jobs", "outer")
CODE = re.compile(r"[a-z]+\.[a-z][a-z0-9_]+")
LITERAL = re.compile(
    r"(env|jail|scorer|train|worker|job)\.(?!json$|jail$|log$|toml$)[a-z_]+|memory\.over_share"
)
"""Codes wherever they stand."""
EVENTS = ("job.done", "job.failed", "job.progress", "job.queued", "job.requeued")
FAULTS = ("JailError", "JobFailedError", "_failed", "_fault")
"""Take a code as their first argument."""
FOREIGN = ("serve.py", "serve_chat.py", "redteam.py")
"""Give codes of another protocol, or play an attacker."""


@cache
def nodes() -> dict[Path, list[ast.AST]]:
    """Of every file, what a code can stand in; walked once, for that is most of the work."""
    files = (path for one in PACKAGES for path in (ROOT / "src/nestling" / one).rglob("*.py"))
    kinds = (ast.FunctionDef, ast.keyword, ast.Call, ast.Constant)
    return {
        path: [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
        for path in files
        if path.name not in FOREIGN
    }


def texts(node: ast.AST) -> Iterator[str]:
    """Literals an expression can be, through `a if b else c`."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=body, orelse=orelse):
            yield from texts(body)
            yield from texts(orelse)


def makers() -> dict[str, list[str]]:
    """Functions with `code=f"...{parameter}..."`: name to the pieces, parameters as `<number>`.

    A private one is told apart by its file.
    """
    found = {}
    for path, found_here in nodes().items():
        for function in (node for node in found_here if isinstance(node, ast.FunctionDef)):
            arguments = [one.arg for one in function.args.args]
            for node in ast.walk(function):
                if isinstance(node, ast.keyword) and node.arg == "code":
                    pieces = list(_pieces(node.value, arguments))
                    if any(piece.startswith("<") for piece in pieces):
                        found[_in_file(function.name, path)] = pieces
    for path, found_here in nodes().items():  # that only hand on: `return maker("rows", code, ...)`
        for node in found_here:
            match node:
                case ast.FunctionDef(
                    name=name,
                    body=[*_, ast.Return(value=ast.Call(func=ast.Name(id=inner)) as call)],
                ) if (maker := found.get(_in_file(inner, path))) and name != inner:
                    arguments = [one.arg for one in node.args.args]
                    found[_in_file(name, path)] = [_handed(one, call, arguments) for one in maker]
    return found


def _handed(piece: str, call: ast.Call, arguments: list[str]) -> str:
    if not piece.startswith("<"):
        return piece
    match call.args[int(piece[1:-1])]:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name) if name in arguments:
            return f"<{arguments.index(name)}>"
    return ""


def _in_file(name: str, path: Path) -> str:
    return f"{path.name}:{name}" if name.startswith("_") else name


def _pieces(value: ast.expr, arguments: list[str]) -> Iterator[str]:
    for part in value.values if isinstance(value, ast.JoinedStr) else ():
        match part:
            case ast.Constant(value=text):
                yield str(text)
            case ast.FormattedValue(value=ast.Name(id=name)) if name in arguments:
                yield f"<{arguments.index(name)}>"


@cache
def codes() -> dict[str, set[str]]:
    """Every code with the files that give it."""
    found = defaultdict(set)
    made_by = makers()
    for path, found_here in nodes().items():
        for node in found_here:
            for code in _codes_of(node, path, made_by):
                found[code].add(path.name)
    for code in (*get_args(OutcomeCode), *get_args(OutcomeStatus)):
        found[code].add("literals")
    return {code: files for code, files in found.items() if code not in EVENTS}


def _codes_of(node: ast.AST, path: Path, made_by: dict[str, list[str]]) -> Iterator[str]:
    match node:
        case ast.keyword(arg="code" | "reason", value=value):
            yield from (text for text in texts(value) if CODE.fullmatch(text))
        case ast.Constant(value=str(text)) if LITERAL.fullmatch(text):
            yield text
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[first, *rest]):
            if name in FAULTS:
                yield from (text for text in texts(first) if CODE.fullmatch(text))
            elif (maker := _in_file(name, path)) in made_by:
                yield from _joined(made_by[maker], [first, *rest])


def _joined(pieces: list[str], arguments: list[ast.expr]) -> Iterator[str]:
    whole = [""]
    for piece in pieces:
        options = list(texts(arguments[int(piece[1:-1])])) if piece.startswith("<") else [piece]
        whole = [start + option for start in whole for option in options]
    yield from (code for code in whole if CODE.fullmatch(code))


def explained() -> set[str]:
    """Codes in the first column of the page's tables."""
    rows = (line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    return {code for cell in rows for code in re.findall(r"`([a-z0-9_.*]+)`", cell)}


def test_every_code_of_the_source_is_explained() -> None:
    missing = {code: sorted(files) for code, files in codes().items() if code not in explained()}
    assert not missing, "add a line to docs/troubleshooting.md"


@pytest.mark.long
def test_the_page_explains_no_code_that_is_gone() -> None:
    source = "\n".join(path.read_text() for path in nodes())
    known = set(codes())
    stages = ("load", "rows", "tools", "rubric", "rollout", "probe", "fleet")
    for code in explained() - known:
        stage, _, rest = code.partition(".")
        assert stage in stages, code
        assert rest.startswith("leak_") or rest in ("*", "...") or rest in source, code


def test_the_collector_sees_every_way_a_code_is_written() -> None:
    assert codes().keys() >= {
        "schema.unknown_key", "static.dunder", "env.deadline", "jail.start", "budget.refused",
        "train.timeout", "rubric.order", "rows.empty", "tools.none", "reward.divergence", "no_call",
        "memory.over_share", "lost",
    }  # fmt: skip
