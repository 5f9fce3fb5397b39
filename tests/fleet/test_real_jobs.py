"""Real jobs through the fleet: probe, training and scoring, also when their worker is killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import torch

from nestling.core.rundir import ArtifactStore
from nestling.engine.checkpoint import Model, save_model
from nestling.engine.config import ModelConfig
from nestling.engine.weights import Weights
from nestling.families.splits import EvalSecret
from nestling.families.vocabulary import tokenizer
from nestling.fleet.runner import FleetRunner, RunnerSettings
from nestling.jobs.bundle import Bundle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap"),
]

JOB = """\
base_model = "micro"
[prime_rl]
lr = 3e-3
max_steps = 3
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

JOB_BUNDLE = Bundle.from_files(
    {
        "job.toml": JOB.encode(),
        "environment/__init__.py": (
            b'from environment.taskset import Taskset\n\n__all__ = ["Taskset"]\n'
        ),
        "environment/taskset.py": TASKSET.encode(),
    }
)


def save_base(folder: Path, width: int) -> None:
    words = tokenizer()
    config = ModelConfig(
        vocab_size=words.vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=width // 2,
    )
    weights = Weights.init(config, 1, torch.Generator().manual_seed(width))
    save_model(folder, Model(config=config, weights=weights, tokenizer=words))


@pytest.fixture
def settings(tmp_path: Path) -> dict:
    bases = {"nano": tmp_path / "nano", "micro": tmp_path / "micro"}
    for width, folder in zip((16, 32), bases.values(), strict=True):
        save_base(folder, width)
    EvalSecret.load_or_create(tmp_path / "eval.key")
    return {
        "bases": {name: str(folder) for name, folder in bases.items()},
        "secret": str(tmp_path / "eval.key"),
        "state": str(tmp_path / "state"),
        "work": str(tmp_path / "work"),
        "artifacts": str(tmp_path / "artifacts"),
    }


def runner_of(room, settings, seed: int) -> FleetRunner:
    return FleetRunner(
        queue=room.queue,
        writer=room.writer,
        watch=room.watch,
        artifacts=ArtifactStore(Path(settings["artifacts"])),
        settings=RunnerSettings(identity={"seed": seed}),
    )


def facts(outcome) -> dict:
    """What must not depend on the machine's mood."""
    left_out = {"cpu_s", "wall_s", "usd", "model_ref"}
    record = outcome.model_dump(exclude=left_out)
    record["steps"] = [
        {key: value for key, value in step.items() if key != "cpu_s"} for step in record["steps"]
    ]
    return record


async def test_real_jobs_and_a_killed_worker(fleet, until, tmp_path: Path, settings) -> None:
    async with fleet(handlers="real_room:make_handlers", settings=settings) as room:
        runner = runner_of(room, settings, seed=0)
        baselines = await runner.baselines("calc_chain")
        assert set(baselines) == {"nano", "micro"}
        report = await runner.check(JOB_BUNDLE, "calc_chain")
        assert report.stages != ()
        undisturbed = await runner.run(JOB_BUNDLE, "calc_chain")
        assert (undisturbed.status, undisturbed.train_steps) == ("succeeded", 3)
        # The same job under other settings, so that it is not reused; its worker dies half-way.
        again = asyncio.ensure_future(
            runner_of(room, settings, seed=1).run(JOB_BUNDLE, "calc_chain")
        )
        await until(lambda: len(room.store.jobs.all("running")) == 1)
        job_id = room.store.jobs.all("running")[0].id
        await until(
            lambda: any(event.kind == "job.progress" for event in room.store.events.of(job_id))
        )
        victim = room.store.processes.all()[0].pid
        tree = psutil.Process(victim).children(recursive=True)
        os.kill(victim, signal.SIGKILL)
        outcome = await again
        assert facts(outcome) == facts(undisturbed)
        assert room.store.jobs.get(job_id).tries == 2
        assert tree != []
        await until(lambda: not any(child.is_running() for child in tree))
