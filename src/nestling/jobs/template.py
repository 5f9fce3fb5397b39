"""The job a workspace starts from, with two gaps, and the same job filled in well.

The gaps are short texts that occur once in the file, so that an agent fills each with one
`edit_file`. Unedited, the job fails the probe with a message that names the gap.
"""

from __future__ import annotations

from typing import Final

from nestling.families.public_package import public_files
from nestling.families.registry import get
from nestling.jobs.bundle import Bundle
from nestling.jobs.manifest import JobManifest, render_manifest

__all__ = [
    "EXACT_REWARD",
    "RANGE_GAP",
    "REWARDS_GAP",
    "TASKSET_PATH",
    "starting_files",
    "template_files",
    "template_job",
]

TASKSET_PATH: Final = "environment/taskset.py"
RANGE_GAP: Final = "RANGE"
"""To be replaced by the lowest and highest difficulty, for example `2, 5`."""
REWARDS_GAP: Final = "    # REWARDS\n"
"""To be replaced by one or more `@vf.reward` methods, indented by four blanks."""

EXACT_REWARD: Final = """\
    @vf.reward(weight=1.0)
    async def correct(self, trace):
        return float(parse_answer(trace.last_reply) == self.data.answer)
"""
"""1 for exactly the right final turn, else 0: what the hidden eval pays."""

_INIT: Final = """\
from environment.taskset import Taskset

__all__ = ["Taskset"]
"""

_TASKSET: Final = """\
import random

import verifiers.v1 as vf
from tools import Data, State, Tools, parse_answer, sample

LO, HI = RANGE


class TaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Task(vf.Task[Data, State, TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(config.tools)]

    # REWARDS


class TasksetConfig(vf.TasksetConfig):
    num_rows: int = 512
    seed: int = 0
    task: TaskConfig = TaskConfig()


class Taskset(vf.Taskset[Task, TasksetConfig]):
    def load(self):
        rng = random.Random(self.config.seed)
        for _ in range(self.config.num_rows):
            yield Task(sample(rng, LO, HI), self.config.task)
"""

_BASE: Final = {"multi_hop": "nano"}
"""Families whose better base is not micro."""
_LR: Final = 3e-4
"""Steady on both bases for every family; 1e-3 is faster at first and then falls apart."""


def starting_files(family: str) -> dict[str, str]:
    """Path to text: the family's public tools and the template with its gaps."""
    tools = {f"tools/{name}": data.decode() for name, data in public_files(family).items()}
    return {"environment/__init__.py": _INIT, TASKSET_PATH: _TASKSET, **tools}


def template_files(family: str) -> dict[str, str]:
    """Path to text of a complete good job; `examples/` holds the same files."""
    lo, hi = get(family).eval_range
    base = _BASE.get(family, "micro")
    manifest = JobManifest.build(
        base, lr=_LR, max_steps=10, batch_size=64, group_size=8, temperature=1.0
    )
    taskset = _TASKSET.replace(RANGE_GAP, f"{lo}, {hi}", 1).replace(REWARDS_GAP, EXACT_REWARD, 1)
    return {
        "job.toml": render_manifest(manifest),
        "environment/__init__.py": _INIT,
        TASKSET_PATH: taskset,
    }


def template_job(family: str) -> Bundle:
    """The complete good job of a family, frozen."""
    return Bundle.from_files({path: text.encode() for path, text in template_files(family).items()})
