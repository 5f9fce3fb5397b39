import math
from dataclasses import replace

import numpy as np
import pytest

from nestling.report.gather import gather
from nestling.report.power import power_rows

pytestmark = pytest.mark.long

Z = 1.959964 + 0.841621


@pytest.fixture(scope="module")
def data(run_folder):
    return gather(run_folder)


def simulated(data, *, families, pairs, episode_sd, task_sd, family_effects, items=200):
    """Sweep episodes with known sources of variance; uplift intervals as wide as their items make them."""
    rng = np.random.default_rng(3)
    like = next(one for one in data.episodes if one.arm == "template" and one.is_job_done)
    half = 1.959964 * 0.5 / math.sqrt(items)
    rows = []
    for family, effect in zip(families, family_effects, strict=True):
        tasks = rng.normal(0, task_sd, pairs)
        for arm in ("untrained", "template"):
            noise = rng.normal(0, episode_sd / math.sqrt(2), pairs)
            rewards = 0.5 + tasks + noise + effect * (arm == "template")
            rows += [
                replace(
                    like,
                    id=f"{arm}/{family}/{member}",
                    arm=arm,
                    family=family,
                    member=member,
                    reward=float(reward),
                    post=0.7,
                    best_pre=0.4,
                    uplift=0.3,
                    uplift_ci=(0.3 - half, 0.3 + half),
                    num_items=items,
                )
                for member, reward in enumerate(rewards)
            ]
    return replace(data, episodes=tuple(rows))


def test_sources_of_variance_are_told_apart(data):
    made = simulated(
        data,
        families=("ledger", "dispatch"),
        pairs=2_000,
        episode_sd=0.2,
        task_sd=0.1,
        family_effects=(0.0, 0.3),
    )
    [row] = power_rows(made, 0.05)
    assert (row.arm, row.against, row.families) == ("template", "untrained", ("dispatch", "ledger"))
    assert row.episode_sd == pytest.approx(0.2, rel=0.05)
    assert row.task_sd == pytest.approx(0.1, rel=0.1)
    assert row.family_sd == pytest.approx(0.3 / math.sqrt(2), rel=0.05)
    assert row.pairs == pytest.approx((Z * 0.2 / 0.05) ** 2, rel=0.1)
    assert row.detectable == pytest.approx(Z * 0.2 / math.sqrt(4_000), rel=0.05)
    one_arm = 0.60 * (0.25 * math.sqrt(0.7 * 0.3 / 200) + 0.75 / 0.6 * 0.5 / math.sqrt(200))
    assert row.item_sd == pytest.approx(math.sqrt(2) * one_arm, rel=1e-6)


def test_more_items_lower_the_floor_and_the_need(data):
    made = simulated(
        data, families=("ledger",), pairs=100, episode_sd=0.2, task_sd=0.0, family_effects=(0.1,)
    )
    [row] = power_rows(made, 0.05)
    assert [need.items for need in row.by_items] == [100, 200, 400, 800, 1_600]
    floors = [need.floor for need in row.by_items]
    assert floors == pytest.approx([floors[0] / math.sqrt(2**i) for i in range(5)])
    for need in row.by_items:
        if need.floor >= 0.05:
            assert need.pairs is None
        else:
            assert need.pairs >= row.pairs
    assert row.by_items[1].floor == pytest.approx(Z * row.item_sd)


def test_planned_size_finds_the_effect_four_times_out_of_five(data):
    made = simulated(
        data, families=("ledger",), pairs=5_000, episode_sd=0.2, task_sd=0.1, family_effects=(0.0,)
    )
    [row] = power_rows(made, 0.05)
    played = np.random.default_rng(11).normal(0.05, 0.2, size=(4_000, row.pairs))
    errors = played.std(axis=1, ddof=1) / math.sqrt(row.pairs)
    found = np.mean(played.mean(axis=1) / errors > 1.96)
    assert found == pytest.approx(0.8, abs=0.04)


def test_a_real_sweep_gets_a_statement_for_each_arm_and_scope(data):
    rows = power_rows(data)
    assert {(row.arm, row.families) for row in rows} == {
        (arm, families)
        for arm in ("step-000004", "noop", "random", "template")
        for families in (("dispatch", "ledger"), ("triage",))
    }
    for row in rows:
        assert row.against == "untrained"
        assert row.difference.n == 12 * len(row.families)
        assert row.effect == 0.05
        assert row.detectable > 0


def test_too_few_pairs_say_nothing(data):
    few = tuple(one for one in data.episodes if one.arm is None or one.member < 3)
    assert power_rows(replace(data, episodes=few)) == []
    assert power_rows(replace(data, episodes=())) == []
    with pytest.raises(ValueError, match="effect"):
        power_rows(data, 0.0)


def test_without_an_untrained_agent_the_no_op_is_what_arms_are_compared_with(data):
    others = tuple(one for one in data.episodes if one.arm != "untrained")
    rows = power_rows(replace(data, episodes=others))
    assert {row.against for row in rows} == {"noop"}
