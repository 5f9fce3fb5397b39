import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.jobs.probe_static import static_problems
from nestling.jobs.template import template_files

PATH = "environment/more.py"


def problems_of(source):
    files = {path: text.encode() for path, text in template_files("ledger").items()}
    return static_problems(files | {PATH: source.encode()})


@pytest.mark.parametrize(
    "source",
    [
        "import re\nDIGITS = re.compile('\\d')\n",
        "from environment.taskset import Task\n",
        "from . import taskset\n",
        "from .taskset import Task\n",
        "import collections.abc\nfrom typing import Any\n",
        "from pathlib import Path\nROWS = (Path(__file__).parent.parent / 'data').read_text\n",
        "if __name__ == '__main__':\n    pass\n",
        "class A:\n    def __init__(self):\n        self.x = 1\n        self._y = 2\n",
        "",
        "ANSWER = 'RANGE'  # REWARDS in a comment\n",
        "import random\nrng = random.Random(7)\nother = random.Random(x=3)\n",
    ],
)
def test_plain_code_passes(source):
    assert problems_of(source) == []


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        ("import os", "static.import", "import of os is refused"),
        ("import os.path as p", "static.import", "os.path"),
        ("from subprocess import run", "static.import", "subprocess"),
        ("import ctypes", "static.import", "ctypes"),
        ("from importlib import import_module", "static.import", "importlib"),
        ("import nestling.engine", "static.import", "nestling"),
        ("import torch", "static.import", "torch"),
        ("x = __import__('os')", "static.name", "__import__"),
        ("x = exec", "static.name", "exec is refused"),
        ("x = eval('1')", "static.name", "eval is refused"),
        ("exit()", "static.name", "exit is refused"),
        ("import random\nrng = random.Random()", "static.unseeded", "line 2: Random() has no seed"),
        ("from random import Random\nx = Random()", "static.unseeded", "Random() has no seed"),
        ("import random\nx = random.SystemRandom()", "static.unseeded", "SystemRandom()"),
        ("raise SystemExit", "static.name", "SystemExit"),
        ("globals()['x'] = 1", "static.name", "globals"),
        ("x = ().__class__.__bases__", "static.dunder", "__class__"),
        ("x = getattr(1, '__class__')", "static.dunder", "__class__"),
        ("x = f.__globals__", "static.dunder", "__globals__"),
        ("import json\njson.loads = len", "static.patch", "json.loads is overwritten"),
        ("import verifiers.v1 as vf\nvf.Task.score = 1", "static.patch", "vf.score"),
        ("import random\ndel random.random", "static.patch", "random.random"),
        ("import random\nrandom._os", "static.private", "random..._os"),
        ("import pathlib\npathlib.os.environ", "static.private", "pathlib...os"),
        ("def f(:", "static.syntax", "line 1"),
        ("x = 1\n  y = 2", "static.syntax", "unexpected indent"),
    ],
)
def test_each_refusal_names_place_and_word(source, code, says):
    problems = problems_of(source)
    assert code in [problem.code for problem in problems]
    assert any(says in problem.wrong for problem in problems)
    for problem in problems:
        assert problem.stage == "static"
        assert PATH in problem.wrong
        assert len(problem.line()) <= 160, problem.line()


DEEP = {
    "brackets": "x = " + "(" * 10_000,
    "minus": "x = (" + "-\n" * 30_000 + "1)",
    "sum": "x = (" + "1 +\n" * 30_000 + "1)",
    "calls": "x = (f" + "()\n" * 30_000 + ")",
    "attributes": "x = (a\n" + ".b\n" * 30_000 + ")",
    "elif": "if a: pass\n" + "elif a: pass\n" * 5_000,
    "long line": "x = '" + "a" * 30_000 + "'",
    "indent": "if a:\n" + " " * 300 + "pass\n",
}


@pytest.mark.parametrize("source", DEEP.values(), ids=DEEP.keys())
def test_source_made_to_exhaust_the_parser_is_refused(source):
    (problem,) = problems_of(source)
    assert problem.code in ("static.too_complex", "static.syntax")


@pytest.mark.long
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("latin-1")))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_without_an_exception(source):
    for problem in problems_of(source.replace("\0", "").encode("utf-8", "replace").decode()):
        assert problem.line().isprintable()


def test_sources_that_would_take_minutes_to_read_are_refused_at_once():
    files = {f"environment/m{n}.py": b"-a\n" * 40_000 for n in range(8)}
    (problem,) = static_problems(files)
    assert problem.code == "static.too_large"
    assert "data/" in problem.fix
