"""A machine room in this process: real bundles and manifests, plain rules instead of a jail."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from nestling.core.errors import JobRejectedError, Problem
from nestling.families.family import Family
from nestling.families.registry import get
from nestling.jobs.bundle import Bundle
from nestling.jobs.outcome import Outcome
from nestling.jobs.probe_report import Predicted, ProbeReport
from nestling.jobs.template import RANGE_GAP, REWARDS_GAP

BASELINES = {"nano": 0.1712, "micro": 0.2649}


@dataclass(slots=True)
class RuleRunner:
    """Satisfies `JobRunner`; the score follows from base, learning rate and steps alone."""

    checked: list[Bundle] = field(default_factory=list)
    ran: list[Bundle] = field(default_factory=list)
    die_in: str = ""
    error: Callable[[], BaseException] = lambda: ConnectionError("the worker is gone")

    async def check(self, bundle: Bundle, family: str) -> ProbeReport:
        self._maybe_die("check")
        self.checked.append(bundle)
        problems = tuple(_problems(bundle))
        predicted = None if problems else Predicted(cpu_s=10.0, usd=0.0)
        return ProbeReport(ok=not problems, problems=problems, predicted=predicted)

    async def run(self, bundle: Bundle, family: str) -> Outcome:
        self._maybe_die("run")
        self.ran.append(bundle)
        manifest = bundle.manifest()
        values = manifest.prime_rl
        pre, best_pre = BASELINES[manifest.base_model], max(BASELINES.values())
        post = pre + (0.95 - pre) * (1 - math.exp(-200 * values.lr * values.max_steps))
        post = round(post * 200) / 200
        uplift = post - best_pre
        return Outcome(
            job_hash=bundle.job_hash,
            family=family,
            base_model=manifest.base_model,
            status="succeeded",
            pre=pre,
            best_pre=best_pre,
            post=post,
            uplift=uplift,
            uplift_ci=(uplift - 0.07, uplift + 0.07),
            n=200,
            train_steps=values.max_steps,
            base_hash="base",
            final_hash=bundle.job_hash,
        )

    async def baselines(self, family: str) -> dict[str, float]:
        self._maybe_die("baselines")
        return dict(BASELINES)

    def _maybe_die(self, stage: str) -> None:
        if stage == self.die_in:
            raise self.error()


def _problems(bundle: Bundle) -> list[Problem]:
    try:
        bundle.manifest()
    except JobRejectedError as error:
        return error.problems
    for path, data in bundle.files.items():
        text = data.decode()
        for gap in (RANGE_GAP, REWARDS_GAP.strip()):
            if path == "environment/taskset.py" and gap in text.splitlines() + text.split():
                return [_problem("static", f"{path}: {gap} is not filled")]
        try:
            if path.endswith(".py"):
                compile(text, path, "exec")
        except (SyntaxError, ValueError) as error:
            return [_problem("static", f"{path}: {error}")]
    return []


def _problem(stage: str, wrong: str) -> Problem:
    return Problem(stage=stage, code=f"{stage}.rule", wrong=wrong, expected="code", fix="write it")


@pytest.fixture
def runner() -> RuleRunner:
    return RuleRunner()


@pytest.fixture(scope="session")
def make_runner() -> type[RuleRunner]:
    return RuleRunner


@pytest.fixture
def ledger() -> Family:
    return get("ledger")
