"""The product's own handlers over a machine room that answers at once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from nestling.core.errors import Problem
from nestling.core.rundir import ArtifactStore
from nestling.fleet.handlers import job_handlers
from nestling.jobs.outcome import Outcome, StepRecord
from nestling.jobs.probe_report import Predicted, ProbeReport


class Room:
    """Counts in a file what it really did; obeys words in `environment/__init__.py`."""

    def __init__(self, count: Path) -> None:
        self._count = count

    def _note(self, what: str) -> None:
        with self._count.open("a") as file:
            file.write(what + "\n")

    def check(self, bundle, family):
        self._note("check")
        if b"kill" in bundle.files["environment/__init__.py"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if b"wrong" in bundle.files["environment/__init__.py"]:
            problem = Problem(stage="load", code="load.x", wrong="w", expected="e", fix="f")
            return ProbeReport(ok=False, problems=(problem,))
        return ProbeReport(ok=True, predicted=Predicted(cpu_s=3.0, usd=0.01))

    def run(self, bundle, family, log):
        self._note("run")
        source = bundle.files["environment/__init__.py"]
        if b"kill" in source:
            os.kill(os.getpid(), signal.SIGKILL)
        if b"slow" in source:
            time.sleep(30)
        step = StepRecord(
            step=0,
            reward_mean=0.5,
            reward_std=0.1,
            loss=None,
            grad_norm=None,
            kl=None,
            learning_rate=0.1,
            trained_groups=2,
            rollout_tokens=10,
            cpu_s=0.1,
        )
        log(step)
        return Outcome(
            job_hash=bundle.job_hash,
            family=family,
            base_model="nano",
            status="succeeded",
            pre=0.25,
            best_pre=0.5,
            post=0.75,
            uplift=0.25,
            uplift_ci=(0.1, 0.4),
            n=4,
            train_steps=1,
            steps=(step,),
        )

    def baselines(self, family):
        self._note("baseline")
        return {"nano": 0.25, "micro": 0.5}


def make_handlers(settings):
    room = Room(Path(settings["count"]))
    return job_handlers(room, ArtifactStore(Path(settings["artifacts"])))
