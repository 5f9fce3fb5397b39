"""A family as an installable verifiers package, for software that knows nothing of this product.

The package holds the family's own public modules, so its tools, prompts and answers are those of
our training and hidden evaluation; its rows come from a seed of the reader's choice and are never
those of a hidden set.
"""

from __future__ import annotations

from pathlib import Path

from nestling import __version__
from nestling.core.errors import ConfigError
from nestling.core.rundir import write_atomic
from nestling.families.family import Family
from nestling.families.public_package import public_modules
from nestling.families.registry import get

__all__ = ["VERIFIERS", "verifiers_package", "write_verifiers_package"]

VERIFIERS = "verifiers>=0.4.0,<0.5"
"""What the taskset is written for; its classes are those of `verifiers.v1`."""

_PYPROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "nestling-{dashed}"
version = "{version}"
description = "The task family {name} of Nestling as a verifiers taskset."
readme = "README.md"
requires-python = ">=3.11"
license = "Apache-2.0"
dependencies = ["{verifiers}"]

[tool.hatch.build.targets.wheel]
packages = ["{module}"]
"""

_INIT = '''"""The task family {name} of Nestling: `verifiers` finds the taskset here."""

from .taskset import {classname}

__all__ = ["{classname}"]
'''

_TASKSET = '''"""Rows of {name}, its tools, and a reward for exactly the right answer."""

import random

import verifiers.v1 as vf

from .answer import parse_answer
from .{name}_tools import Data, State, Tools, sample


class TaskConfig(vf.TaskConfig):
    """Settings of one task."""

    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Task(vf.Task[Data, State, TaskConfig]):
    """One question with its tools."""

    @classmethod
    def toolsets(cls, config):
        return [Tools(config.tools)]

    @vf.reward(weight=1.0)
    async def correct(self, trace):
        """1.0 when the last turn is exactly `ANSWER: <the answer>`."""
        return float(parse_answer(trace.last_reply) == self.data.answer)


class TasksetConfig(vf.TasksetConfig):
    """Which rows: `num_rows` drawn with `seed`, of difficulty `lo` to `hi` (1 to {highest})."""

    num_rows: int = 512
    seed: int = 0
    lo: int = {lo}
    hi: int = {hi}
    task: TaskConfig = TaskConfig()


class {classname}(vf.Taskset[Task, TasksetConfig]):
    """The family's rows."""

    def load(self):
        rng = random.Random(self.config.seed)
        for _ in range(self.config.num_rows):
            yield Task(sample(rng, self.config.lo, self.config.hi), self.config.task)
'''

_README = """# nestling-{dashed}

{spec}

Tools: {signatures}

- Install: `pip install .`
- Load: `verifiers.v1.load_taskset(TasksetConfig(id="{module}"))`, or the id `{module}` wherever verifiers or prime-rl
  asks for a taskset.
- Settings: `num_rows` (512), `seed` (0), `lo` ({lo}), `hi` ({hi}); difficulties go from 1 to {highest}.
- Reward: `correct`, 1.0 when the last turn is exactly `ANSWER: <the answer>`, else 0.0.

Written by Nestling {version}, Apache-2.0. Its rows are drawn from the same law as Nestling's hidden sets, whose seeds
stay secret; a score here is no score there.
"""


def verifiers_package(family: str | Family) -> dict[str, bytes]:
    """Path to content of the package.

    Raises:
        ConfigError: there is no such family.
    """
    chosen = get(family)
    lo, hi = chosen.eval_range
    module = f"nestling_{chosen.name}"
    fields = {
        "name": chosen.name,
        "dashed": chosen.name.replace("_", "-"),
        "module": module,
        "classname": "".join(part.capitalize() for part in chosen.name.split("_")) + "Taskset",
        "spec": chosen.spec.strip(),
        "signatures": f"`{chosen.tool_signatures}`",
        "lo": lo,
        "hi": hi,
        "highest": chosen.highest,
        "version": __version__,
        "verifiers": VERIFIERS,
    }
    texts = {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        f"{module}/__init__.py": _INIT,
        f"{module}/taskset.py": _TASKSET,
    }
    files = {path: text.format(**fields).encode() for path, text in texts.items()}
    return files | {f"{module}/{path}": data for path, data in public_modules(chosen).items()}


def write_verifiers_package(family: str | Family, folder: Path) -> list[Path]:
    """Write the package into a folder that is new or empty; returns its files.

    Raises:
        ConfigError: no such family, or the folder holds something.
        StoreError: it cannot be written.
    """
    files = verifiers_package(family)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} is not empty; expected a new folder for the package; name another one"
        )
    for path, data in files.items():
        write_atomic(folder / path, data)
    return [folder / path for path in files]
