"""What a family has to keep, as checks that name what is wrong; they need no model.

`shape_problems` looks only and is run whenever a plug-in is loaded; `play_problems` plays items;
`toolset_problems` imports the verifiers toolset, which takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import random
import re
from typing import Any, Final

from nestling.families.family import Family, Item
from nestling.families.public.answer import parse_answer

__all__ = ["MIN_PROMPTS", "SHARED", "play_problems", "shape_problems", "toolset_problems"]

SHARED: Final = ("answer", "item", "rollout", "steps")
"""Modules of `families/public/` that go into every workspace."""
MIN_PROMPTS: Final = 1600
"""Different prompts at least: three hidden sets of 400 and the public examples."""

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_VALUES: Final = {
    "spec": str,
    "eval_range": tuple,
    "held_out": bool,
    "vocabulary": tuple,
    "highest": int,
    "modules": tuple,
    "public_package": str,
    "tool_signatures": str,
}
_METHODS: Final = ("sample", "grade", "start", "call", "solve", "corrupt", "guess")
_RULES: Final = ("HIGHEST", "SIGNATURES", "call", "sample", "start")
_DRAWS: Final = 4000
_MAX_CALLS: Final = 64
_WORST: Final = 5
"""Problems told at a time."""


def shape_problems(family: object, name: str) -> list[str]:
    """What an object lacks to be the family `name`; empty when nothing."""
    if isinstance(family, type):
        return [f"{family.__name__} is a class; expected an instance, such as FAMILY = Kind()"]
    own = getattr(family, "name", None)
    problems = []
    if own != name:
        problems.append(f"its name is {own!r}, that of its entry point {name!r}")
    if not _NAME.fullmatch(name):
        problems.append(f"the name {name!r} is not of lower-case letters, digits and single _")
    rules = getattr(family, "rules", None)
    if rules is not None:
        lacking = [one for one in _RULES if not hasattr(rules, one)]
        problems += [f"its rules {rules.__name__} lack {one}" for one in lacking]
    if problems:
        return problems
    problems += [f"it has no method {one}" for one in _METHODS if not _callable(family, one)]
    for one, kind in _VALUES.items():
        if not isinstance(getattr(family, one, None), kind):
            problems.append(f"{one} is {getattr(family, one, None)!r}, not a {kind.__name__}")
    return problems or [*_range_problems(family), *_module_problems(family)]  # type: ignore[arg-type]


def play_problems(family: Family, num_items: int = 60, seed: int = 0) -> list[str]:
    """What goes wrong when items are drawn, solved, corrupted and graded; a few at a time."""
    problems: list[str] = []
    for number in range(num_items):
        lo, hi = (1, family.highest) if number % 2 else family.eval_range
        try:
            item = family.sample(random.Random(seed + number), lo, hi)
            again = family.sample(random.Random(seed + number), lo, hi)
            found = _item_problems(family, item, again, random.Random(number))
        except Exception as e:  # noqa: BLE001 (the family's own code may raise anything)
            found = [f"{type(e).__name__}: {e}"]
        problems += [f"item of seed {seed + number}: {one}" for one in found]
        if len(problems) >= _WORST:
            return problems
    rng = random.Random(seed)
    prompts = {family.sample(rng, *family.eval_range).prompt for _ in range(_DRAWS)}
    if len(prompts) < MIN_PROMPTS:
        problems.append(
            f"{_DRAWS} draws gave {len(prompts)} different prompts; expected {MIN_PROMPTS}, as the "
            "hidden sets share none; vary more in the prompt or widen eval_range"
        )
    return problems


def toolset_problems(family: Family) -> list[str]:
    """Whether the verifiers toolset is what the pure functions are; imports verifiers."""
    where = f"{family.public_package}.{family.name}_tools"
    try:
        module = importlib.import_module(where)
    except Exception as e:  # noqa: BLE001 (the family's own code may raise anything)
        return [f"{where} cannot be imported: {type(e).__name__}: {e}"]
    lacking = [one for one in ("Data", "State", "Tools", "sample") if not hasattr(module, one)]
    if lacking:
        return [f"{where} has no {', '.join(lacking)}"]
    item = family.sample(random.Random(0), *family.eval_range)
    problems = [
        f"State of {where} has no field {field!r}, which start() fills"
        for field in family.start(item)
        if field not in module.State.model_fields
    ]
    offered = re.findall(r"(\w+)\(([^)]*)\)", family.tool_signatures)
    for tool, arguments in offered:
        expected = re.findall(r"(\w+):", arguments)
        method = getattr(module.Tools, tool, None)
        given = [] if method is None else [*inspect.signature(method).parameters][1:]
        if method is None or given != expected:
            problems.append(f"Tools of {where} has no {tool}({', '.join(expected)})")
    row = module.sample(random.Random(0), *family.eval_range)
    if row.prompt != item.prompt:
        problems.append(f"sample of {where} draws other rows than the rules")
    return problems


def _callable(family: object, name: str) -> bool:
    return callable(getattr(family, name, None))


def _range_problems(family: Family) -> list[str]:
    span = family.eval_range
    good = len(span) == 2 and all(type(one) is int for one in span)
    if good and 1 <= span[0] <= span[1] <= family.highest:
        return []
    return [f"eval_range is {span!r}; expected (lo, hi) with 1 <= lo <= hi <= {family.highest}"]


def _module_problems(family: Family) -> list[str]:
    problems = [
        f"its public module {one!r} has the name of a shared one" for one in family.modules
        if one in SHARED
    ]  # fmt: skip
    if f"{family.name}_tools" not in family.modules:
        problems.append(f"modules do not name {family.name}_tools")
    for one in family.modules:
        try:
            missing = importlib.util.find_spec(f"{family.public_package}.{one}") is None
        except ImportError:
            missing = True
        if missing:
            problems.append(f"there is no module {family.public_package}.{one}")
    return problems


def _item_problems(family: Family, item: Item, again: Item, rng: random.Random) -> list[str]:
    if again.to_dict() != item.to_dict():
        return ["the same seed gave another item; draw from the given rng alone"]
    if json.loads(json.dumps(item.to_dict())) != item.to_dict():
        return ["it changes on its way through JSON; use lists, not tuples, and text keys"]
    if parse_answer(f"ANSWER: {item.answer}") != item.answer:
        return [f"the answer {item.answer!r} is empty or has blanks; one word is expected"]
    if family.grade(item, f"ANSWER: {item.answer}") != 1.0 or family.grade(item, item.answer):
        return ["grade does not take `ANSWER: ` and the answer as right and all else as wrong"]
    if parse_answer(f"ANSWER: {family.guess(item, rng)}") is None:
        return ["guess gives nothing that can be an answer"]
    refused = family.call(item, family.start(item), "no such tool", {})
    if not refused.startswith("error:"):
        return [f"an unknown tool is answered {refused!r}; a text with error: is expected"]
    return _solution_problems(family, item, rng)


def _solution_problems(family: Family, item: Item, rng: random.Random) -> list[str]:
    state, spoiled = family.start(item), family.start(item)
    solution = family.solve(item)
    result: Any = None
    for number in range(_MAX_CALLS):
        try:
            _, name, arguments = solution.send(result)
        except StopIteration as end:
            if end.value != item.answer:
                return [f"solve gives {end.value!r}, its answer is {item.answer!r}"]
            if number != item.num_calls:
                return [f"solve makes {number} calls, num_calls is {item.num_calls}"]
            return []
        wrong = family.corrupt(item, rng, name, dict(arguments))
        if not isinstance(family.call(item, spoiled, *wrong), str):
            return [f"the call {wrong} is not answered with a text"]
        result = family.call(item, state, name, dict(arguments))
        if not isinstance(result, str) or not result:
            return [f"{name}({arguments}) is answered {result!r}; a text is expected"]
    return [f"solve makes more than {_MAX_CALLS} calls"]
