"""Every code block of README and docs runs, or is listed here with the reason why not.

A page is played from top to bottom like a notebook: its shell blocks in one folder (`cd` lasts), its
Python blocks in one namespace. Commands are those of the page; `_SMALLER` adds options that make
training short. Blocks marked `text` or `console` show output or sessions and are not run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import pytest

from nestling.cli.main import cli
from nestling.config import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "examples/README.md", "examples/open-model/README.md")
SHOWN = ("text", "console", "dockerfile")
"""Languages of what is shown, not run."""
COMMANDS = ("git", "kubectl", "make", "nestling", "pip", "pytest", "ray", "for")
"""Blocks without a language that begin with one of these are shell all the same."""

ACCOUNT = "needs an account or a key"
SERVES = "serves until it is stopped; tests/cli and tests/dash start the same commands"
OTHER_MACHINES = "needs other machines; tests/fleet and tests/runpod have local ones"
LONG = "takes minutes to hours; the parts are tested with small settings"
INSTALLS = (
    "installs from an index, which tests do not use; tests/docs/test_install.py installs a wheel"
)
FETCHES = "downloads a model; tests/families/test_fetch_open.py does it from local wheels"

NOT_RUN: dict[tuple[str, str], str] = {
    ("README.md", "git clone"): INSTALLS,
    ("docs/quickstart.md", "pip install ."): INSTALLS,
    (
        "docs/quickstart.md",
        "docker build",
    ): "needs Docker; tests/docs/test_install.py runs the steps",
    ("docs/families.md", "pip install"): "tests/families/test_plugins.py installs one by pip",
    ("docs/dashboard.md", "nestling dash"): SERVES,
    ("docs/endpoints.md", "nestling serve hatchling  "): SERVES,
    ("docs/endpoints.md", "nestling serve hatchling --port"): SERVES,
    ("docs/endpoints.md", "export NESTLING_API_KEY"): ACCOUNT,
    ("docs/endpoints.md", "nestling export"): "needs a finished run; tests/cli exports one",
    (
        "docs/endpoints.md",
        "from transformers",
    ): "needs the extra parity; tests/outer loads an export",
    ("docs/endpoints.md", "nestling families package"): INSTALLS,
    ("docs/open-models.md", "pip install"): FETCHES,
    ("docs/open-models.md", "nestling job run JOB"): FETCHES,
    ("docs/plumbing.md", "nestling bench"): LONG,
    ("docs/prime-rl.md", "python -m venv"): INSTALLS,
    ("docs/ray.md", "pip install"): OTHER_MACHINES,
    ("docs/ray.md", "ray start"): OTHER_MACHINES,
    ("docs/ray.md", "kubectl"): OTHER_MACHINES,
    ("docs/runpod.md", "nestling fleet simulate-runpod"): OTHER_MACHINES,
    ("docs/security.md", "nestling redteam"): "make test runs it",
    ("docs/tinker.md", "pip install"): ACCOUNT,
    ("examples/open-model/README.md", "for family"): FETCHES,
}
"""Page and beginning of a block to the reason why it is not run."""

QUICK = ("docs/tutorial.md",)
"""Pages that the fast suite plays; the others are slow."""

_SMALLER = {
    "run": ("--set", "outer.steps=1", "--set", "outer.group_size=2", "--set", "inner.eval_items=8",
            "--set", "outer.held_out.every_steps=0"),
    "job run": ("--eval-items", "8"),
    "episode": ("--set", "inner.eval_items=8"),
    "eval-agent": ("-n", "1", "--set", "inner.eval_items=8"),
    "baselines": ("--set", "inner.eval_items=8"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    @property
    def reason(self) -> str | None:
        """Why it is not run; None when it is."""
        starts = [(page, start) for page, start in NOT_RUN if page == self.page]
        found = [key for key in starts if self.text.startswith(key[1])]
        return NOT_RUN[found[0]] if found else None

    def commands(self) -> Iterator[list[str]]:
        """Arguments of every `nestling` command in it."""
        for line in self.text.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s#.*", "", line).removeprefix("$ ")
            for part in re.split(r"&&|\||;|&$", line) if "'" not in line else [line.rstrip("&")]:
                with contextlib.suppress(ValueError):
                    words = shlex.split(part)
                    if words[:1] == ["nestling"]:
                        yield words[1:]


@cache
def blocks() -> tuple[Block, ...]:
    found = []
    for path in [*(ROOT / page for page in PAGES), *sorted((ROOT / "docs").glob("*.md"))]:
        page = str(path.relative_to(ROOT))
        text = path.read_text("utf-8")
        for match in re.finditer(r"^```([^\n`]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            language, body = match[1].strip(), match[2]
            if language.startswith("{"):
                continue
            if not language:
                first = (body.split() or [""])[0]
                language = "sh" if first in COMMANDS and "─" not in body else "text"
            found.append(Block(page, text[: match.start()].count("\n") + 1, language, body))
    return tuple(found)


def runnable(page: str) -> list[Block]:
    here = [block for block in blocks() if block.page == page]
    return [one for one in here if one.language in ("sh", "python") and one.reason is None]


PLAYED = sorted({block.page for block in blocks() if runnable(block.page)})


def test_every_block_has_a_language_that_says_what_becomes_of_it() -> None:
    known = ("sh", "python", "toml", *SHOWN)
    assert not [block for block in blocks() if block.language not in known]


def test_the_list_of_blocks_that_are_not_run_is_up_to_date() -> None:
    there = [block for block in blocks() if block.language in ("sh", "python")]
    idle = [
        (page, start)
        for page, start in NOT_RUN
        if not any(one.page == page and one.text.startswith(start) for one in there)
    ]
    assert not idle, "no block begins so; correct or remove the entry"


@pytest.mark.parametrize("block", [one for one in blocks() if one.language == "toml"], ids=str)
def test_toml_parses_and_recipe_sections_hold(block: Block) -> None:
    document = tomllib.loads(block.text)
    if document.keys() <= RunConfig.model_fields.keys():
        RunConfig.model_validate(document)


def test_every_command_of_the_pages_exists_with_its_options() -> None:
    wrong = []
    for block in blocks():
        for words in block.commands() if block.language in ("sh", "console") else ():
            if "..." in words:
                continue
            try:
                _parse(cli, words)
            except click.UsageError as error:
                if "does not exist" not in str(error):
                    wrong.append(
                        f"{block.page}:{block.line}: nestling {shlex.join(words)}: {error}"
                    )
    assert not wrong


def _parse(command: click.Command, words: list[str]) -> None:
    """Parse as the program would, without running anything."""
    context = command.make_context("nestling", list(words))
    while isinstance(context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        name, inner, left = context.command.resolve_command(context, rest)
        assert inner is not None
        context = inner.make_context(name, left, parent=context)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.long if page in QUICK else pytest.mark.slow)
        for page in PLAYED
    ],
)
@pytest.mark.timeout(1200)
def test_a_page_plays_from_top_to_bottom(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{_commands(tmp_path / 'bin')}:{os.environ['PATH']}")
    monkeypatch.setenv("NESTLING_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MPLBACKEND", "agg")
    work = tmp_path / "work"
    work.mkdir()
    for name in ("recipes", "examples"):
        shutil.copytree(ROOT / name, work / name)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in runnable(page):
        monkeypatch.chdir(work)
        if block.language == "python":
            exec(compile(block.text, f"{page}:{block.line}", "exec"), namespace)
        else:
            work = _shell(block, work)


def _shell(block: Block, work: Path) -> Path:
    """Run one block; the folder it ends in."""
    mark = Path(os.environ["NESTLING_STATE"]).parent / "here"
    script = f"{block.text}\npwd > {shlex.quote(str(mark))}\n"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=work, capture_output=True, text=True, timeout=900
    )  # fmt: skip
    where = f"{block.page}:{block.line}"
    assert done.returncode == 0, f"{where}\n{done.stdout}\n{done.stderr}"
    return Path(mark.read_text().strip())


def _commands(folder: Path) -> Path:
    """A folder with `nestling`, which hands on what it is given and makes training short."""
    folder.mkdir()
    program = folder / "nestling"
    program.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, re, runpy, sys\n"
        f"smaller = {_SMALLER!r}\n"
        "words = sys.argv[1:]\n"
        "for length in (2, 1):\n"
        "    if len(words) >= length and ' '.join(words[:length]) in smaller:\n"
        "        sys.argv += smaller[' '.join(words[:length])]\n"
        "        break\n"
        "if words[:2] == ['job', 'run']:\n"
        "    toml = pathlib.Path(words[2], 'job.toml')\n"
        "    toml.write_text(re.sub('max_steps = .*', 'max_steps = 1', toml.read_text()))\n"
        "sys.argv[0] = 'nestling'\n"
        "from nestling.cli.main import main\n"
        "main()\n"
    )
    program.chmod(0o755)
    return folder
