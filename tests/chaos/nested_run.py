"""A controller of real jobs as a process: episodes that submit one job each and are paid for it.

    python nested_run.py FOLDER NUM_EPISODES WORKERS

Continues where an earlier one was killed; exits 0 when every episode is paid.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import nestling
from nestling.agent.reward import compute_terms
from nestling.core.clock import SystemClock
from nestling.core.rundir import RunDir
from nestling.fleet.budget import Budget, Caps, load_prices
from nestling.fleet.pool import PoolLimits
from nestling.fleet.providers.local import LocalProvider, LocalWorkers
from nestling.fleet.runner import FleetRunner, RunnerSettings
from nestling.fleet.start import running_fleet
from nestling.jobs.bundle import Bundle
from nestling.store import GroupCommit, RunStore

FAMILY = "calc_chain"

_PATHS = (
    str(Path(__file__).parents[1] / "fleet"),
    # Workers run the copy of the program that this process runs.
    str(Path(nestling.__file__).parents[1]),
)

JOB = """\
base_model = "micro"
[prime_rl]
lr = {lr}
max_steps = {steps}
batch_size = 32
group_size = 8
max_tokens = 16
"""

TASKSET = """\
import verifiers.v1 as vf


class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def pays(self, trace):
        return 1.0 - min(len(trace.last_reply), 120) / 120


class Taskset(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for n in range(64):
            yield Task(vf.TaskData(prompt=f"{n}", name=str(n)), self.config.task)
"""


def bundle(number: int) -> Bundle:
    """Every episode's own job."""
    text = JOB.format(lr=f"{(number + 1) * 1e-4:.1e}", steps=2 + number % 3)
    package = b'from environment.taskset import Taskset\n\n__all__ = ["Taskset"]\n'
    return Bundle.from_files(
        {
            "job.toml": text.encode(),
            "environment/__init__.py": package,
            "environment/taskset.py": TASKSET.encode(),
        }
    )


async def episode(number: int, fleet: FleetRunner, writer: GroupCommit) -> None:
    """Submit, wait, be paid; nothing when it is paid already."""
    name, group, store = f"e{number}", f"g{number % 3}", writer.store

    def start() -> str:
        store.progress.open_group(
            group, purpose="train", step=0, family=FAMILY, seed=0, size=64, learner_version=None
        )
        return store.episodes.start(
            name, group_id=group, idx=number, family=FAMILY, policy="fixed", seed=number
        ).state

    if await writer.run(start) == "finished":
        return
    outcome = await fleet.for_episode(name, group).run(bundle(number), FAMILY)
    terms = compute_terms(outcome, valid_attempt=1, submitted=True, budget_share=0.1)["seed"]
    summary = {
        "status": outcome.status,
        "reason": outcome.reason,
        "post": outcome.post,
        "weights": outcome.final_hash,
        "rewards": [step.reward_mean for step in outcome.steps],
    }
    await writer.run(
        lambda: store.episodes.finish(
            name,
            outcome=outcome.status,
            kind="seed",
            reward=terms.total,
            terms=terms.model_dump(mode="json"),
            summary=summary,
        )
    )


async def main(folder: Path, num_episodes: int, workers: int) -> None:
    run = RunDir.create(folder)
    clock = SystemClock()
    settings = json.loads((folder / "settings.json").read_text())
    with RunStore(folder / "run.db") as store, GroupCommit(store) as writer, run.lock():
        provider = LocalProvider(
            LocalWorkers(
                handlers="real_room:make_handlers",
                settings=settings,
                logs=folder / "logs",
                beat_s=1.0,
                environment={"PYTHONPATH": os.pathsep.join(_PATHS)},
            ),
            writer,
        )
        async with running_fleet(
            writer=writer,
            provider=provider,
            size=workers,
            artifacts=run.artifacts,
            settings=RunnerSettings(identity={"test": "chaos"}, max_tries=1000),
            clock=clock,
            budget=Budget(store, clock=clock, caps=Caps(), prices=load_prices()),
            limits=PoolLimits(backoff_s=0.01, max_backoff_s=0.1),
        ) as fleet:
            print("running", flush=True)
            async with asyncio.TaskGroup() as group:
                for number in range(num_episodes):
                    group.create_task(episode(number, fleet, writer))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
