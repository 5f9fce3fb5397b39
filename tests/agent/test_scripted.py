"""Reference agents play real episodes through the same tools."""

from __future__ import annotations

from typing import Any

import pytest

from nestling.agent.episode import EpisodeTask, run_episode
from nestling.agent.episode_result import EpisodeResult
from nestling.agent.policies.scripted import SCRIPTED, scripted
from nestling.core.errors import Problem
from nestling.families.registry import ALL, get
from nestling.jobs.bounds import SMALL
from nestling.jobs.bundle import Bundle
from nestling.jobs.probe_report import ProbeReport
from nestling.jobs.template import template_job


def task(family: str, seed: int = 0) -> EpisodeTask:
    return EpisodeTask(family=get(family), task_id=f"t{seed}", task_seed=seed, policy_seed=seed)


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("name", SCRIPTED)
async def test_every_script_gets_a_job_accepted_at_once(
    runner: Any, name: str, family: str
) -> None:
    result = await run_episode(task(family), scripted(name), runner)
    assert result.outcome_code == "job_succeeded"
    assert result.valid_attempt == 1
    assert result.manifest is not None
    assert result.outcome is not None
    assert result.trajectory is None
    assert result.turns[-1].tool == "submit_job"
    assert EpisodeResult.model_validate_json(result.model_dump_json()) == result


async def play(runner: Any, name: str, family: str = "ledger", seed: int = 0) -> EpisodeResult:
    return await run_episode(task(family, seed), scripted(name), runner)


async def test_noop_earns_the_no_op_line_and_no_more_than_validation_when_paired(
    runner: Any,
) -> None:
    result = await play(runner, "noop")
    assert result.manifest is not None
    assert (result.manifest.base_model, result.manifest.rollouts) == ("micro", 16)
    assert result.terms["paired"].total == 0.35
    assert result.terms["seed"].total == pytest.approx(0.35 + 0.15 * 0.265 + 0.05, abs=0.01)


async def test_template_submits_the_worked_job_byte_for_byte(runner: Any) -> None:
    for family in ALL:
        await play(runner, "template", family)
    assert [bundle.job_hash for bundle in runner.ran] == [
        template_job(family).job_hash for family in ALL
    ]


async def test_oracle_beats_template_beats_noop(runner: Any) -> None:
    rewards = [(await play(runner, name)).reward for name in ("oracle", "template", "noop")]
    assert rewards == sorted(rewards, reverse=True)
    oracle = await play(runner, "oracle")
    assert oracle.manifest is not None
    assert oracle.manifest.base_model == "micro"
    assert oracle.manifest.rollouts == SMALL.max_rollouts


async def test_random_is_within_bounds_and_varied(runner: Any) -> None:
    results = [await play(runner, "random", seed=seed) for seed in range(60)]
    assert {result.outcome_code for result in results} == {"job_succeeded"}
    assert {result.valid_attempt for result in results} == {1}
    manifests = [result.manifest for result in results if result.manifest is not None]
    assert {manifest.base_model for manifest in manifests} == {"nano", "micro"}
    assert len({manifest.prime_rl["lr"] for manifest in manifests}) > 30
    assert len({manifest.prime_rl["optimizer"] for manifest in manifests}) >= 3
    hashes = {bundle.job_hash for bundle in runner.ran}
    assert len(hashes) == 60


async def test_random_draws_another_rubric_when_one_is_refused(make_runner: Any) -> None:
    class Strict(make_runner):
        async def check(self, bundle: Bundle, family: str) -> ProbeReport:
            if self.checked:
                return await super().check(bundle, family)
            self.checked.append(bundle)
            problem = Problem(stage="rubric", code="r", wrong="w", expected="e", fix="f")
            return ProbeReport(ok=False, problems=(problem,))

    result = await play(Strict(), "random")
    assert (result.outcome_code, result.valid_attempt) == ("job_succeeded", 2)
    edits = [turn for turn in result.turns if turn.tool == "edit_file"]
    assert [turn.result for turn in edits] == ["ok"] * 3


async def test_same_seed_same_job(make_runner: Any) -> None:
    jobs: list[list[Bundle]] = []
    for _ in range(2):
        runner = make_runner()
        await play(runner, "random", seed=9)
        jobs.append(runner.ran)
    assert jobs[0] == jobs[1]


def test_unknown_script_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        scripted("clever")
