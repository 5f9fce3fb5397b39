import sys

import pytest

from nestling.cli.main import _COMMANDS

from .conftest import Run

pytestmark = pytest.mark.long

HEAVY = ("torch", "verifiers", "numpy", "scipy", "matplotlib")
PROBE = f"""
import sys
from nestling.cli.main import main
try:
    main()
finally:
    sys.stderr.write("loaded:" + ",".join(name for name in {HEAVY!r} if name in sys.modules))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in _COMMANDS),
        ["job", "run", "--help"],
        ["models", "build", "--help"],
        ["models", "build-agent", "--help"],
        ["bench", "spread", "--help"],
    ],
    ids=" ".join,
)
def test_help_is_told_without_heavy_imports(arguments: list[str]) -> None:
    import subprocess

    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr == "loaded:"


def test_every_command_of_the_table_is_there(here: Run) -> None:
    shown = here("--help").out
    for name in _COMMANDS:
        assert f"\n  {name} " in shown
        assert here(name, "--help").code == 0


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["jobs"], "Did you mean 'job'?"),
        (["eval-agents"], "Did you mean 'eval-agent'?"),
        (["job", "chek", "x"], "Did you mean 'check'?"),
        (["bench", "spraed"], "Did you mean 'spread'?"),
        (["families", "show", "legder"], "Did you mean 'ledger'?"),
        (["episode", "--policy", "noop", "--family", "calcchain"], "Did you mean 'calc_chain'?"),
        (["baselines", "--families", "ledgre"], "Did you mean 'ledger'?"),
        (["run", "--set", "outer.stepz=3", "--dry-run"], "steps"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_typo_names_the_nearest_word(here: Run, arguments: list[str], hint: str) -> None:
    done = here(*arguments)
    assert done.code == 2
    assert hint in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["job", "check"],
        ["job", "run", "x", "--eval-items", "3"],
        ["episode", "--family", "ledger"],
        ["baselines", "--split", "c"],
        ["report"],
        ["bench", "spread", "--seeds", "0"],
        ["job", "render", "x", "--trainer", "other", "--base-model", "m", "--out", "-"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_code_2(here: Run, arguments: list[str]) -> None:
    done = here(*arguments)
    assert done.code == 2
    assert "Error" in done.err
