"""The reference agents and the real, jailed probe agree about what a valid job is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nestling.agent.episode import EpisodeTask, run_episode
from nestling.agent.policies.scripted import SCRIPTED, scripted
from nestling.families.registry import get
from nestling.jobs.bundle import Bundle
from nestling.jobs.probe import ProbeReport, probe


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTED)
async def test_real_probe_accepts_every_script(runner: Any, name: str) -> None:
    class Probed(type(runner)):  # type: ignore[misc]
        async def check(self, bundle: Bundle, family: str) -> ProbeReport:
            return await asyncio.to_thread(probe, bundle, family)

    task = EpisodeTask(family=get("ledger"), task_id="t", task_seed=1, policy_seed=2)
    result = await run_episode(task, scripted(name), Probed())
    refusals = [problem for attempt in result.attempts for problem in attempt.problems]
    assert {problem.stage for problem in refusals} <= ({"rubric"} if name == "random" else set())
    assert result.outcome_code == "job_succeeded"
