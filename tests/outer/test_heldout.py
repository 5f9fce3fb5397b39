import asyncio
import json
import logging
import random

import pytest

from nestling.core.errors import ConfigError, LearnerError
from nestling.core.seeds import derive_seed
from nestling.outer.config import HeldOutConfig, OuterConfig
from nestling.outer.heldout import UNTRAINED, Arm, HeldOutMeasure, sweep
from nestling.outer.store_log import StoreLog, sweeps
from nestling.outer.sweep_report import Sweep

CONFIG = HeldOutConfig(episodes=24, resamples=400)


def arm(name, gain, make_result, *, step=0, fail_on=()):
    """Pays a task-dependent base plus a gain, so that pairing matters."""

    async def play(plan):
        if plan.member in fail_on:
            raise OSError("gone")
        rng = random.Random(derive_seed(plan.task_seed, "base"))
        noise = random.Random(derive_seed(plan.policy_seed, name)).gauss(0, 0.02)
        return make_result(plan, rng.random() * 0.5 + gain + noise)

    return Arm(name=name, play=play, step=step)


async def measure(arms, writer, families=("triage",), **more):
    return await sweep(arms, families, config=CONFIG, seed=9, log=StoreLog(writer), **more)


async def test_pairs_show_a_gain_that_unpaired_spread_would_hide(make_result, writer):
    arms = [arm("untrained", 0.0, make_result), arm("step-10", 0.05, make_result, step=10)]
    found = await measure(arms, writer, against=["untrained"])
    base, trained = (found.result(name).summary for name in ("untrained", "step-10"))
    assert base.reward.hi > trained.reward.lo
    difference = found.comparison("step-10", "untrained").difference
    assert difference.n == 24
    assert difference.lo > 0
    assert difference.p_value < 0.01
    assert found.comparison("untrained", "untrained") is None


async def test_equal_arms_show_nothing(make_result, writer):
    arms = [arm("a", 0.1, make_result), arm("b", 0.1, make_result)]
    difference = (await measure(arms, writer, against=["a"])).comparison("b", "a").difference
    assert difference.p_value > 0.05
    assert difference.lo < 0 < difference.hi


async def test_all_families_are_pooled(make_result, writer):
    found = await measure([arm("a", 0.0, make_result)], writer, families=("triage", "ledger"))
    assert {one.family: one.summary.n for one in found.results} == {
        "triage": 24,
        "ledger": 24,
        "all": 48,
    }


async def test_dead_episodes_leave_their_pairs(make_result, writer, caplog):
    arms = [arm("a", 0.0, make_result), arm("b", 0.1, make_result, fail_on=(0, 5))]
    with caplog.at_level(logging.CRITICAL):
        found = await measure(arms, writer, against=["a"])
    assert found.result("b").dead == 2
    assert found.comparison("b", "a").difference.n == 22


async def test_sweep_continues_where_it_was_cut(make_result, writer, caplog):
    first = arm("a", 0.0, make_result, fail_on=(3,))
    with caplog.at_level(logging.CRITICAL):
        await measure([first], writer)
    played = []
    again = arm("a", 0.0, make_result)

    async def count(plan):
        played.append(plan.member)
        return await again.play(plan)

    found = await measure([Arm(name="a", play=count)], writer)
    assert played == [3]
    assert found.result("a").summary.n == 24


async def test_sweep_survives_json(make_result, writer):
    found = await measure([arm("a", 0.0, make_result), arm("b", 0.0, make_result)], writer, against=["a"])  # fmt: skip
    assert Sweep.model_validate(json.loads(found.model_dump_json())) == found


async def test_learner_failure_ends_the_sweep(make_result, writer):
    async def broken(plan):
        raise LearnerError("no device")

    with pytest.raises(LearnerError):
        await measure([Arm(name="a", play=broken)], writer)


@pytest.mark.parametrize(
    ("names", "against", "message"),
    [(["a", "a"], [], "not unique"), (["a"], ["noop"], "cannot compare")],
)
async def test_wrong_arms_are_refused(make_result, writer, names, against, message):
    arms = [arm(name, 0.0, make_result) for name in names]
    with pytest.raises(ConfigError, match=message):
        await measure(arms, writer, against=against)


async def test_measuring_plays_only_what_is_new(make_result, store, writer):
    """Over two checkpoints: references and the untrained agent are played once."""
    played = []

    class Agent:
        async def play(self, plan, handle):
            played.append((plan.episode_id.split("/")[1], handle))
            rng = random.Random(derive_seed(plan.task_seed, "base"))
            return make_result(plan, rng.random() * 0.5 + 0.1 * handle.version)

    class Weights:
        def __init__(self, version):
            self.version = version

    opened = []

    async def open_untrained():
        opened.append(Weights(0))
        await asyncio.sleep(0)
        return opened[-1]

    seen = []
    measure = HeldOutMeasure(
        Agent(),
        config=OuterConfig(seed=2, held_out=CONFIG),
        families=["triage"],
        log=StoreLog(writer),
        open_untrained=open_untrained,
        references=[arm("noop", 0.0, make_result)],
        on_sweep=lambda step, found: seen.append(step),
    )
    await measure(0, Weights(0))
    assert {name for name, _ in played} == {UNTRAINED}
    assert len(opened) == 1, "all its episodes began at once"
    played.clear()
    store.progress.start_step(1)
    store.progress.finish_step(1, learner_version=1, summary={})
    await measure(1, Weights(1))
    assert {name for name, _ in played} == {"step-000001"}
    assert len(played) == 24
    assert seen == [0, 1]
    kept = sweeps(store)
    assert list(kept) == [0, 1]
    difference = kept[1].comparison("step-000001", UNTRAINED).difference
    assert difference.mean == pytest.approx(0.1)
    assert kept[1].comparison("step-000001", "noop").difference.n == 24
