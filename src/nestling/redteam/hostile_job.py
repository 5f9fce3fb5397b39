"""Jobs that attack: whole bundles for the probe and the trainer, and bare code for a jail."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Final

from nestling.jobs.bundle import Bundle
from nestling.jobs.template import EXACT_REWARD

__all__ = ["EXACT_REWARD", "FAMILY", "SMUGGLED", "hostile_job", "manifest", "reward", "spy_files"]

FAMILY: Final = "calc_chain"

SMUGGLED: Final = """\
os = getattr(random, "_" + "os")
sys = os.sys
"""
"""The system modules without an import, past the static check."""

_INIT: Final = 'from environment.taskset import Taskset\n\n__all__ = ["Taskset"]\n'

_TASKSET: Final = """\
import random

import verifiers.v1 as vf
from tools import Data, State, Tools, parse_answer, sample

{on_import}

class TaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Task(vf.Task[Data, State, TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(config.tools)]

{rewards}

class TasksetConfig(vf.TasksetConfig):
    task: TaskConfig = TaskConfig()


class Taskset(vf.Taskset[Task, TasksetConfig]):
    def load(self):
        rng = random.Random(0)
{rows}
"""

_ROWS: Final = """\
for _ in range(64):
    yield Task(sample(rng, 2, 3), self.config.task)
"""

_SPY: Final = '''\
import ctypes, errno, gc, importlib, json, mmap, os, random, resource, signal, socket
import subprocess, sys, threading, time
import verifiers.v1 as vf

OUT = []

def say(*words):
    OUT.append(" ".join(str(word) for word in words))

def attempt(name, function, *arguments):
    """`DONE` in the report when it worked."""
    try:
        answer = function(*arguments)
    except BaseException as e:
        say("refused", name, type(e).__name__, getattr(e, "errno", ""))
        return None
    say("DONE", name, repr(answer)[:300])
    return answer

def read(path, size=4096):
    with open(path, "rb") as file:
        return file.read(size)

def call(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), "system call")
    return result

{code}

class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def pays(self, trace) -> float:
{on_score}
        return 1.0


class Taskset(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for n in range({num_rows}):
            yield Task(vf.TaskData(prompt="\\n".join(OUT)[:200_000] or "nothing"), self.config.task)

__all__ = ["Taskset"]
'''


def manifest(base: str = "nano", **prime_rl: float | str | bool) -> str:
    """A job.toml; by default the smallest training there is."""
    settings: dict[str, float | str | bool] = {
        "lr": 1e-4,
        "max_steps": 1,
        "batch_size": 16,
        "group_size": 4,
        "max_tokens": 32,
    }
    lines = [f"{key} = {_toml(value)}" for key, value in (settings | prime_rl).items()]
    return f'base_model = "{base}"\n\n[prime_rl]\n' + "\n".join(lines) + "\n"


def reward(body: str, *, name: str = "correct") -> str:
    """A reward method with this body."""
    head = f"    @vf.reward(weight=1.0)\n    async def {name}(self, trace):\n"
    return head + textwrap.indent(textwrap.dedent(body).strip("\n"), "        ") + "\n"


def hostile_job(
    *,
    on_import: str = "",
    rewards: str = EXACT_REWARD,
    rows: str = _ROWS,
    toml: str | None = None,
    files: Mapping[str, str] | None = None,
) -> Bundle:
    """The template's job with an attack in one of its places."""
    taskset = _TASKSET.format(
        on_import=textwrap.dedent(on_import),
        rewards=rewards,
        rows=textwrap.indent(textwrap.dedent(rows), "        "),
    )
    texts = {
        "job.toml": toml or manifest(),
        "environment/__init__.py": _INIT,
        "environment/taskset.py": taskset,
        **(files or {}),
    }
    return Bundle.from_files({path: text.encode() for path, text in texts.items()})


def spy_files(code: str, *, on_score: str = "", num_rows: int = 1) -> dict[str, bytes]:
    """A package that runs `code` on import and sends all it said as the prompt of its rows."""
    source = _SPY.format(
        code=textwrap.dedent(code),
        on_score=textwrap.indent(textwrap.dedent(on_score) or "pass", "        "),
        num_rows=num_rows,
    )
    return {"environment/__init__.py": source.encode()}


def _toml(value: float | str | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)
