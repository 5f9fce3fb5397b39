"""A job's rubric as code: found in its task class, and moved into the task class of another job."""

from __future__ import annotations

import ast
import builtins
import copy
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from nestling.core.errors import JobRejectedError, Problem

__all__ = ["RubricCode", "find_rubric", "graft"]

_Method = ast.FunctionDef | ast.AsyncFunctionDef
_BUILTINS: Final = frozenset(dir(builtins))
_NEWLINE: Final = re.compile("\r\n|\r|\n")
"""Where Python begins a new line; `str.splitlines` does so at more characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RubricCode:
    """The file that holds a job's reward methods, and what in it belongs to them."""

    path: str
    source: str
    tree: ast.Module
    task: ast.ClassDef
    """The class of the reward methods."""
    methods: tuple[_Method, ...]
    """Reward methods and those that they call on `self`, in order."""

    def used(self) -> tuple[str, ...]:
        """The rubric in a form that can be compared: its methods, and what they use, in order."""
        needed = _needed(self.methods, _bindings(self.tree))
        moved = [ast.dump(_plain(one)) for one in self.methods]
        return (*moved, *sorted(map(ast.dump, needed.values())))

    def names_outside(self) -> set[str]:
        """Names that the module uses apart from its rubric and from what only its rubric needs."""
        skipped: list[ast.AST] = [*self.methods]
        needed = _needed(self.methods, _bindings(self.tree))
        while True:
            alone = next(
                (
                    one
                    for name, one in needed.items()
                    if one in self.tree.body
                    and one not in skipped
                    and name not in _loaded(self.tree, [*skipped, one])
                ),
                None,
            )
            if alone is None:
                return _loaded(self.tree, skipped)
            skipped.append(alone)

    def without(self) -> str:
        """The rest of the file in a form that can be compared; imports that it does not use are no part of it."""
        outside = self.names_outside()
        needed = _needed(self.methods, _bindings(self.tree))
        names = {one.name for one in self.methods}
        rest = []
        for statement in copy.deepcopy(self.tree.body):
            if isinstance(statement, ast.ClassDef) and statement.name == self.task.name:
                kept = [one for one in statement.body if getattr(one, "name", None) not in names]
                statement.body = kept
            bound = dict(_bound(statement))
            is_import = isinstance(statement, ast.Import | ast.ImportFrom) and bound
            if is_import:
                rest += [ast.dump(one) for name, one in bound.items() if name in outside | {"*"}]
            elif not bound or bound.keys() & outside or not bound.keys() <= needed.keys():
                rest.append(ast.dump(statement))
        return "\n".join(rest)


def find_rubric(files: Mapping[str, bytes]) -> RubricCode:
    """The rubric of a job's files; `JobRejectedError` when it is not in one class of one file."""
    found = []
    for path, data in files.items():
        if not path.endswith(".py"):
            continue
        source = data.decode()
        with warnings.catch_warnings():  # an odd escape in a string is no fault
            warnings.simplefilter("ignore")
            try:
                tree = ast.parse(source)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise _inseparable(f"{path} cannot be read: {error}") from error
        for task in _classes(tree):
            if any(_is_reward(one) for one in task.body):
                methods = tuple(_rubric_methods(task))
                found.append(
                    RubricCode(path=path, source=source, tree=tree, task=task, methods=methods)
                )
    if len(found) != 1:
        places = ", ".join(f"{one.path}:{one.task.name}" for one in found) or "no class"
        raise _inseparable(f"reward methods are in {places}")
    return found[0]


def graft(host: RubricCode, donor: RubricCode) -> str:
    """The text of the host's file with the donor's rubric in place of its own.

    What the donor's rubric uses comes with it; what only the host's rubric used stays behind, unused.

    Raises:
        JobRejectedError: host and donor mean different things by a name that both need.
    """
    names = {one.name for one in host.methods}
    kept = {one.name for one in host.task.body if isinstance(one, _Method)} - names
    if clash := sorted(kept & {one.name for one in donor.methods}):
        raise _inseparable(f"a method {clash[0]} is part of both")
    lines = _NEWLINE.split(host.source)
    first, last = _span(host.task)
    carried = [ast.unparse(one) for one in _carried(host, donor)]
    body = _body(donor.methods, lines[host.task.body[0].lineno - 1])
    removed = {number for one in host.methods for number in range(_span(one)[0], _span(one)[1] + 1)}
    inside = [lines[number] for number in range(first, last + 1) if number not in removed]
    text = "\n".join([*lines[:first], *carried, *inside, *body, *lines[last + 1 :]])
    if find_rubric({host.path: text.encode()}).used() != donor.used():
        raise _inseparable("the rubric would not be the same in the other job's file")
    return text


def _classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [one for one in tree.body if isinstance(one, ast.ClassDef)]


def _is_reward(node: ast.stmt) -> bool:
    return isinstance(node, _Method) and any(
        (isinstance(part, ast.Attribute) and part.attr == "reward")
        or (isinstance(part, ast.Name) and part.id == "reward")
        for decorator in node.decorator_list
        for part in ast.walk(decorator)
    )


def _rubric_methods(task: ast.ClassDef) -> Iterator[_Method]:
    methods = {one.name: one for one in task.body if isinstance(one, _Method)}
    wanted = {name for name, one in methods.items() if _is_reward(one)}
    queue = list(wanted)
    while queue:
        called = {
            node.attr
            for node in ast.walk(methods[queue.pop()])
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
        new = (called & methods.keys()) - wanted
        wanted |= new
        queue += new
    return (one for name, one in methods.items() if name in wanted)


def _carried(host: RubricCode, donor: RubricCode) -> list[ast.stmt]:
    """Statements of the donor's module that its rubric needs and the host's module lacks."""
    own = _bindings(host.tree)
    elsewhere = host.names_outside()
    carried: list[ast.stmt] = []
    for name, statement in _needed(donor.methods, _bindings(donor.tree)).items():
        if name == donor.task.name:
            raise _inseparable(f"the rubric uses its own class {name}")
        theirs = own.get(name)
        if theirs is not None and ast.dump(theirs) == ast.dump(statement):
            continue
        if theirs is not None and name in elsewhere:
            raise _inseparable(f"the rubric and the rest mean different things by {name}")
        if not any(one is statement for one in carried):
            carried.append(statement)
    return carried


def _loaded(tree: ast.Module, skipped: Sequence[ast.AST]) -> set[str]:
    """Names that the module reads outside these nodes."""
    inside = {id(node) for one in skipped for node in ast.walk(one)}
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in inside
    }


def _plain(method: _Method) -> _Method:
    """The method without its docstring, which says nothing to a trainer."""
    if ast.get_docstring(method, clean=False) is None:
        return method
    plain = copy.deepcopy(method)
    plain.body = plain.body[1:] or [ast.Pass()]
    return plain


def _needed(methods: Sequence[_Method], bindings: Mapping[str, ast.stmt]) -> dict[str, ast.stmt]:
    """Module-level names that the methods use, directly or not, with their statements, in order."""
    wanted: set[str] = set()
    queue: list[ast.AST] = list(methods)
    while queue:
        node = queue.pop()
        new = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} & bindings.keys()
        queue += [bindings[name] for name in new - wanted]
        wanted |= new
    if "*" in bindings and _unknown(methods, bindings):
        wanted.add("*")
    return {name: statement for name, statement in bindings.items() if name in wanted}


def _unknown(methods: Sequence[_Method], bindings: Mapping[str, ast.stmt]) -> set[str]:
    nodes = [node for one in methods for node in ast.walk(one)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    local = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    local |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return names - local - bindings.keys() - _BUILTINS


def _bindings(tree: ast.Module) -> dict[str, ast.stmt]:
    """Names bound at module level to the statement that binds them last; imports one name each."""
    found: dict[str, ast.stmt] = {}
    for statement in tree.body:
        found.update(_bound(statement))
    return found


def _bound(statement: ast.stmt) -> Iterable[tuple[str, ast.stmt]]:
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0], ast.Import([alias])
    elif isinstance(statement, ast.ImportFrom):
        for alias in statement.names if statement.module != "__future__" else ():
            single = ast.ImportFrom(statement.module, [alias], statement.level)
            yield alias.asname or alias.name, single
    elif isinstance(statement, ast.ClassDef | _Method):
        yield statement.name, statement
    else:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id, statement


def _span(node: ast.ClassDef | _Method) -> tuple[int, int]:
    """First and last line, decorators included, from 0."""
    assert node.end_lineno is not None
    return min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1, node.end_lineno - 1


def _body(methods: Sequence[_Method], sample: str) -> list[str]:
    """The methods as lines, indented like `sample`, a line of the class they go into."""
    indent = sample[: len(sample) - len(sample.lstrip())]
    lines = [""]
    for one in methods:
        lines += [
            f"{indent}{line}" if line else "" for line in ast.unparse(_plain(one)).splitlines()
        ]
        lines.append("")
    return lines[:-1]


def _inseparable(why: str) -> JobRejectedError:
    return JobRejectedError(
        [
            Problem(
                stage="ablation",
                code="ablation.inseparable",
                wrong=why,
                expected="reward methods in one class, sharing no name of their own with the rest",
                fix="swap the whole job instead",
            )
        ]
    )
