import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.agent.reward import RewardWeights
from nestling.report.decomposition import gain_account, reward_parts
from nestling.report.diversity import distinct_share, job_difference
from nestling.report.estimates import by_group, stratified
from nestling.report.gather import gather
from nestling.report.levels import family_level, levels
from nestling.report.stages import gain_by_stage

WEIGHTS = RewardWeights()


@pytest.fixture(scope="module")
def data(run_folder):
    return gather(run_folder)


def test_parts_add_up_to_the_reward(data):
    for row in data.steps:
        parts = row.parts
        total = parts.validation + parts.quality + parts.speed + parts.no_submission
        assert total == pytest.approx(row.report.summary.reward.mean)
        assert parts.validation == pytest.approx(0.35 * row.validation.mean)
        assert parts.no_submission == pytest.approx(0.0)
        accepted_and_scored = row.job_success.mean * row.validity.mean
        assert row.quality.mean == pytest.approx(accepted_and_scored * row.scored_quality.mean)


def test_an_episode_without_submission_has_its_price_as_a_part(data):
    one = replace(data.train_episodes[0], reward=-0.1, validation=0.0, quality=0.0, speed=0.0)
    parts = reward_parts([one], WEIGHTS)
    assert parts.no_submission == pytest.approx(-0.1)
    assert parts.validation == parts.quality == parts.speed == 0.0
    assert reward_parts([], WEIGHTS) is None


def test_a_gain_is_shared_out_without_a_rest(data):
    account = data.headline.account
    parts = dict(account.parts())
    total = parts.pop("total")
    assert sum(one.mean for one in parts.values()) == pytest.approx(total.mean)
    gain = data.headline.final.mean - data.headline.untrained.mean
    assert total.mean == pytest.approx(gain)
    assert total.lo < total.mean < total.hi
    first, last = data.steps[0], data.steps[-1]
    validation = 0.35 * (last.validation.mean - first.validation.mean)
    assert parts["validation"].mean == pytest.approx(validation)
    quality = 0.60 * (last.quality.mean - first.quality.mean)
    assert parts["success"].mean + parts["quality"].mean == pytest.approx(quality)


def test_stages_add_up_to_the_whole(data):
    stages = gain_by_stage(data)
    assert [stage.label for stage in stages] == ["whole run"]
    longer = replace(
        data,
        steps=tuple(replace(data.steps[number % 4], step=number + 1) for number in range(9)),
        episodes=tuple(
            replace(one, id=f"{one.id}/{number}", step=number + 1, version=number)
            for number in range(9)
            for one in data.train_episodes
            if one.step == number % 4 + 1
        ),
    )
    account = gain_account(
        by_group([one for one in longer.episodes if one.step == 1]),
        by_group([one for one in longer.episodes if one.step == 9]),
        WEIGHTS,
    )
    longer = replace(longer, headline=replace(data.headline, account=account))
    *thirds, whole = gain_by_stage(longer)
    assert [one.label for one in thirds] == ["steps 1 to 3", "steps 4 to 6", "steps 7 to 9"]
    for name in ("validation", "speed", "no_submission", "total"):
        parts = [getattr(one.account, name).mean for one in thirds]
        assert sum(parts) == pytest.approx(getattr(whole.account, name).mean)


def test_jobs_that_only_stop_dying_count_as_success(data):
    scored = next(one for one in data.train_episodes if one.is_job_done)
    dead = replace(scored, outcome_code="job_failed", quality=0.0, speed=0.0)
    dead = replace(dead, reward=0.35 * dead.validation)
    account = gain_account([[dead], [dead]], [[scored], [scored]], WEIGHTS)
    assert account.success.mean == pytest.approx(0.60 * scored.quality)
    assert account.quality.mean == account.validation.mean == 0.0
    assert gain_account([], [[scored]], WEIGHTS) is None
    assert gain_account([[dead]], [[scored]], WEIGHTS).total.lo is None


def test_reference_lines_weigh_families_like_the_step(data):
    found = levels(data, lambda one: one.reward, "reward")
    assert set(found) == {"noop", "random", "template"}
    for arm, line in found.items():
        assert [one.mean for one in line] == pytest.approx(
            [row.references[arm] for row in data.steps]
        )
        assert all(one.lo <= one.mean <= one.hi for one in line)
        by_family = {
            family: family_level(data, lambda one: one.reward, "reward", family)[arm].mean
            for family in ("ledger", "dispatch")
        }
        assert line[0].mean == pytest.approx(np.mean(list(by_family.values())))


def test_a_stratified_interval_is_that_of_redrawing_within_strata():
    rng = np.random.default_rng(0)
    strata = [(3.0, list(rng.normal(0, 1, 40))), (1.0, list(rng.normal(5, 2, 60)))]
    found = stratified(strata, "test")
    spread = np.sqrt(0.75**2 * np.var(strata[0][1]) / 40 + 0.25**2 * np.var(strata[1][1]) / 60)
    assert found.mean == pytest.approx(0.75 * np.mean(strata[0][1]) + 0.25 * np.mean(strata[1][1]))
    assert (found.hi - found.lo) / 2 == pytest.approx(1.96 * spread, rel=0.1)
    assert found.n == 100
    assert stratified([(1.0, [0.5])], "one").lo is None
    assert stratified([(1.0, [])], "none") is stratified([], "empty") is None


def job(base="micro", env=(), **prime_rl):
    return json.dumps([base, prime_rl, list(env)], sort_keys=True)


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (job(lr=1e-4), job(lr=1e-4), 0.0),
        (job(lr=1e-4), job(lr=3e-4), 1 / 2),
        (job(lr=1e-4), job(base="nano", lr=1e-4), 1 / 2),
        (job(), job(lr=1e-4, max_steps=8), 2 / 3),
        (job(env=["low"]), job(env=["low", "high"]), 1 / 3),
        (job(base="a", lr=1), job(base="b", lr=2), 1.0),
    ],
)
def test_two_jobs_differ_by_their_choices(first, second, difference):
    assert job_difference([first, second]) == pytest.approx(difference)


_JOBS = st.lists(
    st.builds(job, base=st.sampled_from(["a", "b"]), lr=st.sampled_from([1, 2, 3])), max_size=6
)


@given(_JOBS)
def test_difference_and_distinct_share_are_shares(jobs):
    difference, distinct = job_difference(jobs), distinct_share(jobs)
    assert (difference is None) == (distinct is None) == (len(jobs) < 2)
    if difference is not None:
        assert 0.0 <= difference <= 1.0
        assert 1 / len(jobs) <= distinct <= 1.0
        assert (difference == 0.0) == (distinct == 1 / len(jobs))
        pairs = [job_difference(list(pair)) for pair in itertools.combinations(jobs, 2)]
        assert difference == pytest.approx(np.mean(pairs))


def test_diversity_is_counted_within_groups(data):
    for row in data.steps:
        played = [one for one in data.train_episodes if one.step == row.step]
        groups = [[one for one in group if one.is_valid] for group in by_group(played)]
        groups = [group for group in groups if len(group) > 1]
        distinct = [len({one.job_hash for one in group}) / len(group) for group in groups]
        assert row.distinct_in_group.mean == pytest.approx(np.mean(distinct))
        differences = [job_difference([one.settings for one in group]) for group in groups]
        assert row.job_difference.mean == pytest.approx(np.mean(differences))
        for family, shares in row.base_share_by_family.items():
            bases = [one.base_model for one in played if one.family == family and one.is_valid]
            assert shares == {base: bases.count(base) / len(bases) for base in set(bases)}
