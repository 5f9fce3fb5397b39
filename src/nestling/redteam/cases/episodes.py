"""A hostile agent in full episodes, through its own six tools."""

from __future__ import annotations

import asyncio

from nestling.agent.episode import EpisodeTask, run_episode
from nestling.agent.policies.redteam import PLANS, redteam
from nestling.agent.prompt import PromptRules
from nestling.families.registry import get
from nestling.redteam.case import CaseList, Happened
from nestling.redteam.hostile_job import FAMILY
from nestling.redteam.room import JobRunnerOfRoom, TargetRoom

__all__ = ["CASES"]

_LIST = CaseList("hostile episodes")
CASES = _LIST.cases


def _episode(room: TargetRoom, plan: str) -> Happened:
    task = EpisodeTask(
        family=get(FAMILY),
        task_id=f"redteam-{plan}",
        task_seed=1,
        policy_seed=1,
        rules=PromptRules(reward_kind="paired"),
    )
    result = asyncio.run(run_episode(task, redteam(plan), JobRunnerOfRoom(room)))
    text = result.model_dump_json()
    escaped = room.canary.is_in(text) or bool(room.traps.sprung())
    return Happened(
        what=f"{result.outcome_code}, reward {result.reward:.3f} in {result.num_turns} turns",
        succeeded=escaped or result.is_fault or result.reward > 0.35 + 1e-9,
        evidence=result.detail or "; ".join(p.line() for a in result.attempts for p in a.problems),
    )


for _plan, _act in PLANS.items():

    def _attack(room: TargetRoom, plan: str = _plan) -> Happened:
        return _episode(room, plan)

    _LIST.add(
        f"episode-{_plan}",
        _attack,
        act=_act.act,
        expected="an ordinary outcome that pays no more than validation",
    )
