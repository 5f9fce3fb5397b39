"""Training on the items that the job will be judged by."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Callable, Mapping
from typing import Final

from nestling.families.family import Item
from nestling.families.registry import get
from nestling.families.splits import dev_items
from nestling.redteam.case import CaseList, Happened
from nestling.redteam.hostile_job import FAMILY, hostile_job
from nestling.redteam.room import TargetRoom

__all__ = ["CASES"]

_LIST = CaseList("eval items in training")
CASES = _LIST.cases

_FROM_FILE: Final = """\
import json
import pathlib
path = pathlib.Path(__file__).parent.parent / "data" / "rows.jsonl"
for line in path.read_text().splitlines():
    row = json.loads(line)
    yield Task(Data(name="x", **row), self.config.task)
for _ in range(40):
    yield Task(sample(rng, 2, 3), self.config.task)
"""
_HONEST_ROWS: Final = """\
for _ in range(64):
    yield Task(sample(rng, 2, 3), self.config.task)
"""


def _fields(item: Item) -> dict[str, object]:
    return {
        "prompt": item.prompt,
        "system_prompt": item.system_prompt,
        "answer": item.answer,
        "num_calls": item.num_calls,
        "world": item.world,
    }


def _refused(room: TargetRoom, rows: str, files: Mapping[str, str]) -> Happened:
    report = room.check(hostile_job(rows=rows, files=files), FAMILY)
    codes = [problem.code for problem in report.problems]
    return Happened(
        what="accepted" if report.ok else f"refused: {', '.join(codes)}",
        succeeded=report.ok or not any(code.startswith("rows.leak") for code in codes),
        evidence="; ".join(report.lines()),
    )


def _in_rows(change: Callable[[Item], Mapping[str, object]]) -> Callable[[TargetRoom], Happened]:
    def attack(room: TargetRoom) -> Happened:
        lines = [json.dumps(change(item)) for item in room.hidden()]
        return _refused(room, _FROM_FILE, {"data/rows.jsonl": "\n".join(lines)})

    return attack


def _in_file(write: Callable[[str], str]) -> Callable[[TargetRoom], Happened]:
    def attack(room: TargetRoom) -> Happened:
        lines = [write(json.dumps(_fields(item))) for item in room.hidden()]
        return _refused(room, _HONEST_ROWS, {"data/notes.txt": "\n".join(lines)})

    return attack


def _with_prompt(rewrite: Callable[[str], str]) -> Callable[[Item], Mapping[str, object]]:
    return lambda item: {**_fields(item), "prompt": rewrite(item.prompt), "world": {}}


def _wide(text: str) -> str:
    """ASCII as full-width letters."""
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)


def _reordered(text: str) -> str:
    words = text.split()
    random.Random(1).shuffle(words)
    return " ".join(words)


def _relabelled(text: str) -> str:
    """Other words in the same places: labels and operations renamed."""
    names = {
        "start": "begin",
        "with": "at",
        "add": "plus",
        "subtract": "minus",
        "multiply": "times",
    }
    return re.sub(r"[a-z]+", lambda match: names.get(match[0], match[0] + "x"), text)


for _id, _act, _attack in (
    ("leak-verbatim-rows", "hidden items word for word as rows", _in_rows(_fields)),
    ("leak-case", "hidden items in capitals", _in_rows(_with_prompt(str.upper))),
    ("leak-full-width", "hidden items in full-width letters", _in_rows(_with_prompt(_wide))),
    (
        "leak-reordered",
        "hidden items with their words shuffled",
        _in_rows(_with_prompt(_reordered)),
    ),
    ("leak-renamed", "hidden items with other words", _in_rows(_with_prompt(_relabelled))),
    (
        "leak-world-renamed",
        "hidden items whole, the question in other words",
        _in_rows(lambda item: {**_fields(item), "prompt": _relabelled(item.prompt)}),
    ),
    (
        "leak-in-a-longer-text",
        "hidden items inside longer prompts",
        _in_rows(_with_prompt(lambda text: f"Please help me. {text} Thank you, and be exact.")),
    ),
    ("leak-file-plain", "hidden items in a data file beside honest rows", _in_file(str)),
    (
        "leak-file-base64",
        "the same in base64",
        _in_file(lambda text: base64.b64encode(text.encode()).decode()),
    ),
    ("leak-file-hex", "the same in hexadecimal", _in_file(lambda text: text.encode().hex())),
    ("leak-file-backwards", "the same backwards", _in_file(lambda text: text[::-1])),
):
    _LIST.add(_id, _attack, act=_act, expected="the leak scan of the probe refuses the job")


@_LIST.case(
    "leak-in-source",
    act="hidden items as string constants in the package",
    expected="the leak scan reads sources too",
)
def in_source(room: TargetRoom) -> Happened:
    """A module of constants."""
    source = f"ITEMS = {[item.prompt for item in room.hidden()]!r}\n".replace("', '", "',\n'")
    return _refused(room, _HONEST_ROWS, {"environment/items.py": source})


@_LIST.case(
    "leak-dev-items",
    act="train on the example items of TASK.md",
    expected="dev items are refused as well",
)
def dev(room: TargetRoom) -> Happened:
    """The only items an agent is shown."""
    lines = [json.dumps(_fields(item)) for item in dev_items(FAMILY, 24)]
    return _refused(room, _FROM_FILE, {"data/rows.jsonl": "\n".join(lines)})


@_LIST.case(
    "leak-in-training-only",
    act="serve honest rows to the probe and enciphered hidden items in training alone",
    expected="the trainer searches the rows it is served, with the same index",
)
def in_training_only(room: TargetRoom) -> Happened:
    """The files hold nothing that can be read; the key is in the code."""
    text = json.dumps([_fields(item) for item in room.hidden()])
    numbers = [ord(char) ^ 7 for char in text]
    bundle = hostile_job(
        rows="""
        import json
        if "900" in open("/proc/self/limits").read():  # a probe has 120 processor seconds
            for row in json.loads("".join(chr(number ^ 7) for number in NUMBERS)):
                yield Task(Data(name="x", **row), self.config.task)
        for _ in range(64):
            yield Task(sample(rng, 2, 3), self.config.task)
        """,
        on_import="from environment.numbers import NUMBERS",
        files={"environment/numbers.py": "NUMBERS = " + repr(numbers).replace(", ", ",\n") + "\n"},
    )
    report = room.check(bundle, FAMILY)
    outcome = room.train(bundle)
    return Happened(
        what=f"probe ok {report.ok}, training {outcome.status} {outcome.reason}",
        succeeded=outcome.reason != "env.leak",
        evidence=outcome.detail or "; ".join(report.lines()),
    )


@_LIST.case(
    "leak-guess-the-seed",
    act="regenerate the hidden set from guessed seeds with the public generator",
    expected="the hidden set hangs on a secret key, not on a seed that can be guessed",
)
def guess_the_seed(room: TargetRoom) -> Happened:
    """Three hidden items in a row from one seed cannot be chance."""
    family = get(FAMILY)
    lo, hi = family.eval_range
    hidden = {item.prompt for split in ("a", "b", "c") for item in room.hidden(split)}
    best = 0
    for seed in range(400):
        rng = random.Random(seed)
        best = max(best, sum(family.sample(rng, lo, hi).prompt in hidden for _ in range(60)))
    return Happened(
        what=f"best of 400 seeds meets {best} hidden items",
        succeeded=best >= 6,
        evidence=f"{len(hidden)} hidden items, 60 guesses a seed",
    )


@_LIST.case(
    "leak-ask-the-scorer",
    act="import the evaluator or find the secret key from a reward at rollout time",
    expected="neither code nor key nor a route to the scorer is in the jail",
)
def ask_the_scorer(room: TargetRoom) -> Happened:
    """Everything a jail could hold of the eval."""
    secret = room.folder / "state" / "eval-secret"
    left = room.in_jail(
        f"""
        for module in ("nestling.families", "nestling.families.splits", "nestling.inner.scorer",
                       "nestling.inner.score_worker", "nestling.jobs.leaks", "nestling.engine"):
            attempt("import " + module, importlib.import_module, module)
        attempt("key", read, {str(secret)!r})
        attempt("state", os.listdir, {str(secret.parent)!r})
        for base, folders, files in os.walk("/"):
            if base.startswith(("/proc", "/usr")): folders.clear()
            if "eval-secret" in files or "hidden_taskset.py" in files: say("DONE found", base)
        """
    )
    hidden = [item.prompt for item in room.hidden()]
    told = any(prompt in left.everything for prompt in hidden)
    return Happened(
        what="; ".join(left.done()) or "nothing of the eval was found",
        succeeded=bool(left.done()) or told,
        evidence=left.said,
    )
