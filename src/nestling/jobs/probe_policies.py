"""Scripted policies that a rubric must be able to tell apart: one right, the others not.

Each plays one row: it yields tool calls, is sent the replies and returns its last turn.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nestling.engine.chat import render_call
from nestling.families.family import Family, Item
from nestling.families.public.answer import parse_answer
from nestling.jobs.rollout_env import Row

__all__ = [
    "MANY_CALLS",
    "ORACLE",
    "POLICIES",
    "Call",
    "Lesson",
    "Script",
    "lesson_of",
    "most_common_answer",
]

Call = tuple[str, dict[str, Any], str]
"""Tool, arguments, the whole turn."""
Script = Generator[Call, str, str]
Solution = tuple[tuple[str, str, dict[str, Any]], ...]
"""Label, tool and arguments of each call."""

ORACLE: Final = "the correct answer"
MANY_CALLS: Final = 10

_MAX_STEPS: Final = 64
_MISFITS: Final = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a family's pure functions raise on a world that is not theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One row with what the scripted policies need to know about it."""

    row: Row
    answer: str | None
    """What the row says is right; None when it has no text or number `answer`."""
    solution: Solution
    """The family's own solution; empty for rows of another making."""
    found: str | None
    """The answer that solution leads to; None for rows of another making."""
    wrong: str
    """A plausible wrong answer."""
    common: str
    """The most frequent answer among the rows."""
    schemas: tuple[dict[str, Any], ...]
    seed: int


def lesson_of(
    row: Row, family: Family, schemas: Sequence[dict[str, Any]], common: str, seed: int
) -> Lesson:
    """Solve a row with the family's own solver where it is one of the family's items."""
    data = json.loads(row.data_json)
    fields = data if isinstance(data, dict) else {}
    answer = fields.get("answer")
    answer = str(answer) if isinstance(answer, str | int | float) else None
    rng = random.Random(seed)
    item = _item(row, fields)
    solution, found = ((), None) if item is None else _solve(family, item)
    wrong = "" if item is None or found is None else _wrong_answer(family, item, rng)
    return Lesson(
        row=row,
        answer=answer,
        solution=solution,
        found=found,
        wrong=wrong or ("0" if answer != "0" else "1"),
        common=common,
        schemas=tuple(schemas),
        seed=seed,
    )


def most_common_answer(rows: Sequence[Row]) -> str:
    """The answer that pays most often when nothing is read; `0` when rows have no answers."""
    answers: Counter[str] = Counter()
    for row in rows:
        data = json.loads(row.data_json)
        if isinstance(data, dict) and isinstance(data.get("answer"), str | int | float):
            answers[str(data["answer"])] += 1
    return answers.most_common(1)[0][0] if answers else "0"


def _item(row: Row, fields: dict[str, Any]) -> Item | None:
    """The family item in a row made by `tools.sample`; None for any other row."""
    answer, calls, world = (fields.get(key) for key in ("answer", "num_calls", "world"))
    if not (isinstance(answer, str) and isinstance(calls, int) and isinstance(world, dict)):
        return None
    if not world:
        return None
    return Item(
        prompt=row.prompt,
        system_prompt=row.system_prompt,
        answer=answer,
        num_calls=calls,
        world=world,
    )


def _solve(family: Family, item: Item) -> tuple[Solution, str | None]:
    """Play the solver against the family's own tools; nothing found when the row does not fit.

    The row was written by the job, so its world may be anything; the lookups then fail with one of
    the errors caught here.
    """
    steps: list[tuple[str, str, dict[str, Any]]] = []
    try:
        solver, state = family.solve(item), family.start(item)
        label, name, arguments = next(solver)
        while len(steps) < _MAX_STEPS:
            steps.append((str(label), name, arguments))
            reply = family.call(item, state, name, arguments)
            label, name, arguments = solver.send(reply)
    except StopIteration as stop:
        answer = parse_answer(f"ANSWER: {stop.value}")
        return (tuple(steps), answer) if answer is not None else ((), None)
    except _MISFITS:
        return (), None
    return (), None


def _wrong_answer(family: Family, item: Item, rng: random.Random) -> str:
    """A plausible answer that is not the item's; empty when the family finds none."""
    try:
        return next((g for _ in range(8) if (g := family.guess(item, rng)) != item.answer), "")
    except _MISFITS:
        return ""


def _oracle(lesson: Lesson) -> Script:
    """The family's solution on the row's own data; without one, the row's answer at once."""
    yield from _solution(lesson)
    return f"ANSWER: {lesson.answer}"


def _wrong(lesson: Lesson) -> Script:
    yield from _solution(lesson)
    return f"ANSWER: {lesson.wrong}"


def _guess(lesson: Lesson) -> Script:
    return f"ANSWER: {lesson.wrong}"
    yield


def _random(lesson: Lesson) -> Script:
    rng = random.Random(lesson.seed)
    for _ in range(2):
        if lesson.schemas:
            yield _random_call(lesson, rng)
    return f"ANSWER: {rng.choice(lesson.row.prompt.split() or ['?'])}"


def _empty(lesson: Lesson) -> Script:  # noqa: ARG001
    return ""
    yield


def _echo(lesson: Lesson) -> Script:
    return lesson.row.prompt
    yield


def _constant(lesson: Lesson) -> Script:
    return f"ANSWER: {lesson.common}"
    yield


def _copy(lesson: Lesson) -> Script:
    """One call, then its reply; in answer form unless one call is all the row needs."""
    reply = ""
    if lesson.solution or lesson.schemas:
        rng = random.Random(lesson.seed)
        reply = yield _first_call(lesson, rng)
    return f"ANSWER: {reply}" if len(lesson.solution) > 1 else reply


def _many(lesson: Lesson) -> Script:
    rng = random.Random(lesson.seed)
    for _ in range(MANY_CALLS):
        if lesson.solution or lesson.schemas:
            yield _first_call(lesson, rng)
    return f"ANSWER: {lesson.wrong}"


POLICIES: Final[dict[str, Callable[[Lesson], Script]]] = {
    ORACLE: _oracle,
    "a wrong answer": _wrong,
    "a guess without tool calls": _guess,
    "random calls and words": _random,
    "an empty turn": _empty,
    "a copy of the prompt": _echo,
    "always the same answer": _constant,
    "a copy of a tool reply": _copy,
    "many tool calls": _many,
}
"""By what each does, in words for a message."""


def _solution(lesson: Lesson) -> Generator[Call, str, None]:
    for label, name, arguments in lesson.solution:
        yield name, arguments, f"{label}{render_call(name, arguments)}"


def _first_call(lesson: Lesson, rng: random.Random) -> Call:
    if lesson.solution:
        label, name, arguments = lesson.solution[0]
        return name, arguments, f"{label}{render_call(name, arguments)}"
    return _random_call(lesson, rng)


def _random_call(lesson: Lesson, rng: random.Random) -> Call:
    """A tool with arguments of the right types: words of the prompt and small numbers."""
    function = rng.choice(lesson.schemas).get("function", {})
    name = str(function.get("name", ""))
    properties = function.get("parameters", {}).get("properties", {})
    words = lesson.row.prompt.split() or ["x"]
    arguments: dict[str, Any] = {}
    for key, schema in properties.items():
        kind = schema.get("type") if isinstance(schema, dict) else None
        if kind == "integer":
            arguments[key] = rng.randint(1, 40)
        elif kind == "number":
            arguments[key] = float(rng.randint(1, 40))
        elif kind == "boolean":
            arguments[key] = rng.random() < 0.5
        else:
            arguments[key] = rng.choice(words)
    return name, arguments, render_call(name, arguments)
