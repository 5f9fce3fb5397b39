"""What a worker does when the environment of a job, or a part of the worker, ends without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from nestling.core.errors import Problem
from nestling.core.rundir import ArtifactStore
from nestling.fleet.handlers import job_handlers, pack_bundle
from nestling.fleet.messages import Work
from nestling.fleet.worker import HandlerContext
from nestling.jobs.bundle import Bundle
from nestling.jobs.outcome import Outcome
from nestling.jobs.probe_report import ProbeReport

BUNDLE = Bundle.from_files({"job.toml": b'base_model = "nano"\n', "environment/__init__.py": b""})


class Services:
    """Answers with these reasons, one a call; empty is success."""

    def __init__(self, *reasons: str) -> None:
        self.left = list(reasons)

    def check(self, bundle, family):
        reason = self.left.pop(0)
        if not reason:
            return ProbeReport(ok=True)
        problem = Problem(stage="load", code=reason, wrong="w", expected="e", fix="f")
        return ProbeReport(ok=False, problems=(problem,))

    def run(self, bundle, family, log):
        reason = self.left.pop(0)
        return Outcome(
            job_hash=bundle.job_hash,
            family=family,
            base_model="nano",
            status="failed" if reason else "succeeded",
            reason=reason,
        )

    def baselines(self, family):
        raise NotImplementedError


def do(folder: Path, kind: str, *reasons: str) -> tuple[dict, list[str]]:
    artifacts, services = ArtifactStore(folder / "artifacts"), Services(*reasons)
    payload = {"family": "ledger", "bundle": pack_bundle(artifacts, BUNDLE)}
    work = Work(token="t", job_id="j", kind=kind, payload=payload)
    context = HandlerContext(work, lambda message: None)
    return job_handlers(services, artifacts)[kind](payload, context), services.left


def test_environment_that_was_ended_from_outside_is_tried_again(tmp_path: Path) -> None:
    outcome, left = do(tmp_path, "run", "env.exited", "", "unused")
    assert (outcome["status"], left) == ("succeeded", ["unused"])
    report, left = do(tmp_path, "check", "load.exited", "env.exited", "")
    assert (report["ok"], left) == (True, [])


def test_environment_that_ends_itself_every_time_is_its_own_fault(tmp_path: Path) -> None:
    outcome, left = do(tmp_path, "run", "env.exited", "env.exited", "env.exited", "unused")
    assert (outcome["reason"], left) == ("env.exited", ["unused"])


def test_other_failures_are_final_at_once(tmp_path: Path) -> None:
    outcome, left = do(tmp_path, "run", "train.diverged", "unused")
    assert (outcome["reason"], left) == ("train.diverged", ["unused"])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("run", "jail.zygote"), ("run", "scorer.died"), ("check", "load.jail_zygote")],
)
def test_broken_part_of_the_worker_ends_the_worker(tmp_path: Path, kind: str, reason: str) -> None:
    with pytest.raises(SystemExit, match="broken"):
        do(tmp_path, kind, reason)
