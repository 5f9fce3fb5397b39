"""Read a job's source without running it: syntax, gaps, imports, and what is never needed.

This is for clear messages and early refusal, not the defence: agent code is only ever run in the
jail, and a check of this kind can always be talked around.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Final

from nestling.core.errors import Problem
from nestling.jobs.template import RANGE_GAP, REWARDS_GAP

__all__ = ["ALLOWED_MODULES", "static_problems"]

ALLOWED_MODULES: Final = frozenset(
    {
        "__future__", "abc", "ast", "bisect", "collections", "copy", "csv", "dataclasses", "datetime",
        "decimal", "difflib", "enum", "environment", "fractions", "functools", "heapq", "itertools",
        "json", "math", "numbers", "operator", "pathlib", "pydantic", "random", "re", "statistics",
        "string", "textwrap", "tools", "typing", "unicodedata", "verifiers",
    }
)  # fmt: skip
"""Top-level packages a job may import."""

_REFUSED_NAMES: Final = frozenset(
    {
        "__builtins__", "__import__", "__loader__", "__spec__", "breakpoint", "compile", "delattr",
        "eval", "exec", "exit", "globals", "input", "locals", "quit", "setattr", "vars",
        "BaseException", "SystemExit", "KeyboardInterrupt", "GeneratorExit",
    }
)  # fmt: skip
_REFUSED_ATTRIBUTES: Final = frozenset({"os", "sys", "socket", "subprocess", "io", "builtins"})
_ALLOWED_DUNDERS: Final = frozenset(
    {
        "__all__", "__file__", "__name__", "__main__", "__doc__", "__init__", "__post_init__",
        "__len__", "__iter__", "__next__", "__getitem__", "__contains__", "__repr__", "__str__",
        "__enter__", "__exit__", "__call__", "__hash__", "__lt__", "__annotations__",
        "__version__",
    }
)  # fmt: skip
_DUNDER: Final = re.compile(r"__\w+__")
_MAX_LINE_CHARS: Final = 20_000
_MAX_INDENT: Final = 200
_MAX_SOURCE_BYTES: Final = 131_072
"""Of all files together; a syntax tree takes hundreds of bytes and some time per byte."""


def static_problems(files: Mapping[str, bytes]) -> list[Problem]:
    """Everything found in the job's Python files, in path and line order."""
    problems: list[Problem] = []
    trees: dict[str, ast.Module] = {}
    total = sum(len(data) for path, data in files.items() if path.endswith(".py"))
    if total > _MAX_SOURCE_BYTES:
        return [
            _static(
                "too_large",
                f"the Python files have {total} bytes",
                f"at most {_MAX_SOURCE_BYTES}",
                "keep data in data/",
            )
        ]
    for path, data in sorted(files.items()):
        if not path.endswith(".py"):
            continue
        parsed = _parse(path, data.decode())
        if isinstance(parsed, Problem):
            problems.append(parsed)
        else:
            trees[path] = parsed
    if not problems:
        problems += _gap_problems(files, trees)
    for path, tree in trees.items():
        found = sorted(_tree_problems(path, tree), key=lambda pair: pair[0])
        problems += [problem for _, problem in found]
    if not problems and "environment/__init__.py" in trees:
        problems += _export_problems(trees["environment/__init__.py"])
    return problems


def _parse(path: str, source: str) -> ast.Module | Problem:
    for number, line in enumerate(source.splitlines(), 1):
        indent = len(line) - len(line.lstrip())
        if len(line) > _MAX_LINE_CHARS or indent > _MAX_INDENT:
            return _static(
                "too_complex",
                f"{_place(path, number)} is too long or nested too deep",
                "plain code",
                "split it",
            )
    try:
        with warnings.catch_warnings():  # an odd escape in a string is no fault
            warnings.simplefilter("ignore")
            return ast.parse(source, path)
    except SyntaxError as error:
        number = error.lineno or 1
        text = " ".join((error.text or "").split())[:40]
        return _static(
            "syntax",
            f"{_place(path, number)}: {(error.msg or 'bad syntax')[:50]}",
            "valid Python",
            f"correct that line: {text}" if text else "correct that line",
        )
    except (ValueError, RecursionError, MemoryError):
        return _static("too_complex", f"{path} is nested too deep", "plain code", "simplify it")


def _gap_problems(files: Mapping[str, bytes], trees: Mapping[str, ast.Module]) -> list[Problem]:
    """The template's gaps that were left as they are."""
    problems = []
    has_reward = any(_uses_reward(tree) for tree in trees.values())
    for path, tree in trees.items():
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        is_bound = any(node.id == RANGE_GAP and isinstance(node.ctx, ast.Store) for node in names)
        used = next((node for node in names if node.id == RANGE_GAP), None)
        if used is not None and not is_bound:
            problems.append(
                _static(
                    "gap",
                    f"{_place(path, used.lineno)}: {RANGE_GAP} is not filled in",
                    "lowest, highest difficulty",
                    f"replace {RANGE_GAP} by two numbers such as 2, 5",
                )
            )
        if not has_reward and REWARDS_GAP.strip() in files[path].decode():
            problems.append(
                _static(
                    "gap",
                    f"{path}: {REWARDS_GAP.strip()} is not filled in",
                    "a reward method",
                    "replace it by an @vf.reward async def",
                )
            )
    if not has_reward and not problems and trees:
        problems.append(
            _static(
                "no_reward",
                "no @vf.reward method was found",
                "at least one in class Task",
                "add @vf.reward() above an async def",
            )
        )
    return problems


def _uses_reward(tree: ast.Module) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "reward")
        or (isinstance(node, ast.Name) and node.id == "reward")
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for decorator in function.decorator_list
        for node in ast.walk(decorator)
    )


def _tree_problems(path: str, tree: ast.Module) -> Iterator[tuple[int, Problem]]:
    modules = _imported_names(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        place = _place(path, line)
        for name in _imports(node):
            if name.split(".")[0] not in ALLOWED_MODULES:
                yield (
                    line,
                    _static(
                        "import",
                        f"{place}: import of {name[:30]} is refused",
                        "verifiers, tools or plain standard library",
                        "remove it",
                    ),
                )
        yield from ((line, problem) for problem in _word_problems(place, node))
        yield from ((line, problem) for problem in _patch_problems(place, node, modules))
        yield from ((line, problem) for problem in _reward_problems(place, node))
        yield from ((line, problem) for problem in _chance_problems(place, node))


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "environment"] if node.level == 0 else ["environment"]
    return []


def _imported_names(tree: ast.Module) -> set[str]:
    """Names bound by import statements."""
    return {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }


def _word_problems(place: str, node: ast.AST) -> Iterator[Problem]:
    """Built-ins and double-underscore names that lead out of plain code."""
    if isinstance(node, ast.Name) and node.id in _REFUSED_NAMES:
        yield _static("name", f"{place}: {node.id} is refused", "plain code", "do without it")
    word = ""
    if isinstance(node, ast.Attribute):
        word = node.attr
    elif isinstance(node, ast.Name):
        word = node.id
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        word = node.value
    if _DUNDER.fullmatch(word) and word not in _ALLOWED_DUNDERS | _REFUSED_NAMES:
        yield _static("dunder", f"{place}: {word[:30]} is refused", "plain code", "do without it")


def _patch_problems(place: str, node: ast.AST, modules: set[str]) -> Iterator[Problem]:
    """Overwriting an attribute of something imported, or reaching through it to the system."""
    if not isinstance(node, ast.Attribute):
        return
    root: ast.expr = node
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name) or root.id not in modules:
        return
    is_private = node.attr.startswith("_") and not _DUNDER.fullmatch(node.attr)
    if is_private or node.attr in _REFUSED_ATTRIBUTES:
        yield _static(
            "private",
            f"{place}: {root.id}...{node.attr[:20]} is refused",
            "public names of allowed modules",
            "do without it",
        )
    elif not isinstance(node.ctx, ast.Load):
        yield _static(
            "patch",
            f"{place}: {root.id}.{node.attr[:20]} is overwritten",
            "imported modules left as they are",
            "use a name of your own",
        )


def _reward_problems(place: str, node: ast.AST) -> Iterator[Problem]:
    """Verifiers awaits rewards, so a plain function would fail in every rollout."""
    if not isinstance(node, ast.FunctionDef):
        return
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(target, ast.Attribute) and target.attr == "reward":
            yield _static(
                "plain_reward",
                f"{place}: reward {node.name[:30]} is a plain def",
                "async def",
                f"write async def {node.name[:30]}",
            )


def _chance_problems(place: str, node: ast.AST) -> Iterator[Problem]:
    """A generator that starts elsewhere each time: other rows in training than in the probe."""
    if not isinstance(node, ast.Call):
        return
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    name = node.func.id if isinstance(node.func, ast.Name) else name
    if name == "SystemRandom" or (name == "Random" and not node.args and not node.keywords):
        yield _static(
            "unseeded",
            f"{place}: {name}() has no seed",
            "the same rows at every start",
            "use random.Random(self.config.seed)",
        )


def _export_problems(tree: ast.Module) -> list[Problem]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return []
    return [
        _static(
            "export",
            "environment/__init__.py has no __all__",
            '__all__ = ["Taskset"]',
            "import your Taskset there and list its name",
        )
    ]


def _place(path: str, line: int) -> str:
    short = path if len(path) <= 36 else "..." + path[-33:]
    return f"{short} line {line}"


def _static(code: str, wrong: str, expected: str, fix: str) -> Problem:
    clean = "".join(c if c.isprintable() else "?" for c in fix)
    return Problem(stage="static", code=f"static.{code}", wrong=wrong, expected=expected, fix=clean)
