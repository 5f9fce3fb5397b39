"""The attacking agent plays whole episodes and earns nothing by it."""

from __future__ import annotations

import pytest

from nestling.agent.episode import EpisodeTask, run_episode
from nestling.agent.paper_probe import PaperRunner
from nestling.agent.policies.redteam import PLANS, redteam
from nestling.families.registry import get


@pytest.mark.parametrize("plan", PLANS)
async def test_a_plan_is_played_to_an_ordinary_end(plan, tmp_path):
    task = EpisodeTask(
        family=get("ledger"),
        task_id=plan,
        task_seed=1,
        policy_seed=2,
        folder=tmp_path / "parent" / "workspace",
    )
    (tmp_path / "parent").mkdir()
    result = await run_episode(task, redteam(plan), PaperRunner())
    assert [entry.name for entry in (tmp_path / "parent").iterdir()] == ["workspace"]
    assert result.reward <= 0.35
    if plan in ("paths", "malformed", "forged-answer"):
        assert result.terms["paired"].no_submission


async def test_the_same_seeds_play_the_same_attack():
    task = EpisodeTask(family=get("ledger"), task_id="x", task_seed=1, policy_seed=2)
    first, second = [await run_episode(task, redteam("paths"), PaperRunner()) for _ in range(2)]
    assert first.turns == second.turns


def test_an_unknown_plan_is_an_error():
    with pytest.raises(KeyError):
        redteam("nothing")
