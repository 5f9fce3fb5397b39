"""One small job for all tests of this folder."""

from __future__ import annotations

import pytest

from nestling.jobs.jail import JailLimits

TOOLS = '''
import verifiers.v1 as vf


class State(vf.State):
    accounts: dict[str, int] = {}
    calls: int = 0


class Tools(vf.Toolset[vf.ToolsetConfig, State]):
    TOOL_PREFIX = None

    async def setup_task(self, task) -> None:
        self.state.accounts = dict(task.opening)

    @vf.tool
    def deposit(self, account: str, amount: int) -> str:
        """Put money into an account."""
        self.state.calls += 1
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.state.accounts[account] = self.state.accounts.get(account, 0) + amount
        return str(self.state.accounts[account])

    @vf.tool
    async def balance(self, account: str) -> int:
        """Read a balance."""
        self.state.calls += 1
        return self.state.accounts.get(account, 0)


if __name__ == "__main__":
    Tools.run()
'''

TASKSET = """
import random

import verifiers.v1 as vf

from tools import State, Tools, VALUE


class Data(vf.TaskData):
    answer: int
    opening: dict[str, int]


class Config(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Task(vf.Task[Data, State, Config]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(config.tools)]

    @vf.reward(weight=0.8)
    async def correct(self, trace) -> float:
        return float(trace.last_reply == f"ANSWER: {self.data.answer}")

    @vf.reward(weight=0.2)
    async def books(self, task, trace) -> float:
        return float(trace.state.accounts.get("ann") == task.answer)

    @vf.metric
    async def tool_calls(self, trace) -> float:
        return float(trace.state.calls)

    @vf.metric
    async def shape(self, trace) -> dict[str, float]:
        return {
            "turns": float(trace.num_turns),
            "chars": float(len(trace.transcript)),
            "tool_chars": float(sum(len(m.content) for m in trace.tool_messages)),
            "assistant": float(len(trace.assistant_messages)),
            "branches": float(trace.num_branches),
            "truncated": float(trace.is_truncated),
        }


class TasksetConfig(vf.TasksetConfig):
    num_tasks: int = 40
    task: Config = Config()


class Taskset(vf.Taskset[Task, TasksetConfig]):
    def load(self):
        rng = random.Random(7)
        for _ in range(self.config.num_tasks):
            start, more = rng.randint(1, 90), rng.randint(1, 90)
            yield Task(
                Data(
                    system_prompt="Use deposit and balance.",
                    prompt=f"Deposit {more} to ann. What has ann?",
                    answer=start + more,
                    opening={"ann": start},
                ),
                self.config.task,
            )
"""

PUBLIC_TOOLS = {"__init__.py": b"from tools.bank import State, Tools\nVALUE = 1\n"}
PUBLIC_TOOLS["bank.py"] = TOOLS.encode()


def job_with(taskset: str = TASKSET, **more: str) -> dict[str, bytes]:
    """A job's files; `more` are further modules of its package."""
    init = "from environment.taskset import Taskset\n\n__all__ = ['Taskset']\n"
    modules = {"__init__": init, "taskset": taskset, **more}
    return {f"environment/{name}.py": text.encode() for name, text in modules.items()}


@pytest.fixture
def limits() -> JailLimits:
    return JailLimits(cpu_s=20, processes=12, load_s=20, call_s=8)


@pytest.fixture
def ledger_job() -> dict[str, bytes]:
    return job_with()


@pytest.fixture
def ledger_tools() -> dict[str, bytes]:
    return dict(PUBLIC_TOOLS)


@pytest.fixture
def make_job():
    return job_with


@pytest.fixture
def ledger_taskset_source() -> str:
    return TASKSET
