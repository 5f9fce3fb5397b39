"""The page that compares agents, from a real sweep of scripted episodes."""

from __future__ import annotations

import re

import pytest

from nestling.outer.config import HeldOutConfig
from nestling.outer.heldout import Arm, sweep
from nestling.outer.store_log import StoreLog
from nestling.report.agents_page import ComparedAgent, agents_page, write_agents_page
from nestling.store import GroupCommit, RunStore

from .conftest import episode

CONFIG = HeldOutConfig(episodes=8, resamples=200)


async def _found(folder, families=("ledger", "dispatch")):
    def arm(name: str, skill: float) -> Arm:
        async def play(plan):
            return episode(plan, skill, noop=name == "noop")

        return Arm(name=name, play=play)

    with RunStore(folder / "run.db") as store, GroupCommit(store) as writer:
        return await sweep(
            [arm("noop", 0.0), arm("good", 0.8)],
            families,
            config=CONFIG,
            seed=1,
            log=StoreLog(writer),
            against=["noop"],
        )


async def test_page_holds_rewards_terms_gains_and_power(tmp_path, hostile):
    found = await _found(tmp_path)
    agents = [ComparedAgent(label="noop", arm="noop"), ComparedAgent(label=hostile, arm="good")]
    facts = {"Episodes": "6 each", "Commit": hostile}
    out = tmp_path / "deep" / "page.html"
    write_agents_page(found, agents, out, against="noop", effect=0.05, facts=facts)
    page = out.read_text("utf-8")
    good = found.result("good").summary
    for value in (good.reward.mean, good.validation, good.quality, good.speed):
        assert f"{value:.3f}" in page
    gain = found.comparison("good", "noop").difference
    assert f"{gain.mean:.3f} [{gain.lo:.3f}, {gain.hi:.3f}]" in page
    assert re.search(r"a gain of 0\.05 needs \d+ pairs", page)
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("<svg") == 2
    assert page.count("<td>all</td>") == 2
    assert page.count("<td>ledger</td>") == 2


async def test_one_family_is_not_pooled(tmp_path):
    found = await _found(tmp_path, ("ledger",))
    agents = [ComparedAgent(label="noop", arm="noop"), ComparedAgent(label="good", arm="good")]
    page = agents_page(found, agents, against="noop", effect=0.05, facts={})
    assert "<td>all</td>" not in page
    assert "<h2>ledger</h2>" in page


async def test_an_arm_that_was_not_measured_is_named(tmp_path):
    found = await _found(tmp_path, ("ledger",))
    agents = [ComparedAgent(label="noop", arm="noop"), ComparedAgent(label="x", arm="absent")]
    with pytest.raises(KeyError, match="absent"):
        agents_page(found, agents, against="noop", effect=0.05, facts={})
