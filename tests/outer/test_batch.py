import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.agent.episode_result import EpisodeResult
from nestling.agent.policy import Trajectory
from nestling.agent.reward import Terms
from nestling.outer.batch import DeadEpisode, FinishedGroup, PlayedEpisode, build_batch
from nestling.outer.config import OuterConfig
from nestling.outer.plan import measurement_group, plan_group

CONFIG = OuterConfig(seed=5, groups_per_step=2, group_size=8)
TRAJECTORY = Trajectory(
    ids=(1, 2, 3), sampled=(False, True, True), logprobs=(0.0, -0.5, -0.25), prompt_len=1,
    temperature=0.7,
)  # fmt: skip


def episode(plan, reward, version=0, trajectory=TRAJECTORY):
    terms = {kind: Terms(kind=kind, total=reward) for kind in ("seed", "paired")}
    result = EpisodeResult(
        family=plan.family, task_id="t", task_seed=0, policy_seed=0, reward_kind="seed",
        reward=reward, terms=terms, outcome_code="no_call", trajectory=trajectory,
    )  # fmt: skip
    return PlayedEpisode(plan=plan, version=version, result=result)


def group(rewards, index=0, version=0, **fields):
    plan = plan_group(CONFIG, ["ledger"], index)
    pairs = zip(plan.episodes, rewards, strict=False)
    return FinishedGroup(
        plan=plan, episodes=tuple(episode(one, r, version, **fields) for one, r in pairs)
    )


def batch(groups, version=0, over_stale="clip", std_normalise=False, max_staleness=1):
    return build_batch(
        groups, version=version, max_staleness=max_staleness, over_stale=over_stale,
        std_normalise=std_normalise,
    )  # fmt: skip


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8), st.booleans())
def test_advantages_of_a_group_sum_to_zero(rewards, std_normalise):
    found = batch([group(rewards)], std_normalise=std_normalise)
    assert sum(row.advantage for row in found.rows) == pytest.approx(0.0, abs=1e-6)
    if std_normalise and found.rows:
        assert sum(row.advantage**2 for row in found.rows) / len(rewards) == pytest.approx(1.0)


def test_constant_group_is_counted_not_trained():
    found = batch([group([0.3] * 8), group([0.0, 1.0], index=1)])
    assert (found.constant, found.used, len(found.rows)) == ((0,), (1,), 2)


def test_rows_carry_the_trajectory_and_come_in_order():
    found = batch([group([0.0, 1.0], index=3, version=2), group([1.0, 0.0], index=1)], version=3)
    assert [(row.group, row.member, row.staleness) for row in found.rows] == [
        (1, 0, 3),
        (1, 1, 3),
        (3, 0, 1),
        (3, 1, 1),
    ]
    assert found.rows[0].ids == [1, 2, 3]
    assert found.rows[0].sampled == [False, True, True]
    assert found.rows[0].logprobs == [0.0, -0.5, -0.25]


@pytest.mark.parametrize(("policy", "rows"), [("clip", 2), ("drop", 0)])
def test_over_stale_group_is_clipped_or_dropped(policy, rows):
    found = batch([group([0.0, 1.0])], version=2, over_stale=policy)
    assert len(found.rows) == rows
    assert found.over_stale == ((0,) if policy == "clip" else ())
    assert found.dropped == ((0,) if policy == "drop" else ())


@pytest.mark.parametrize("rewards", [[], [0.5]])
def test_group_with_nothing_to_compare_is_short(rewards):
    assert batch([group(rewards)]).short == (0,)


def test_episode_without_tokens_counts_for_the_mean_only():
    plan = plan_group(CONFIG, ["ledger"], 0)
    mixed = FinishedGroup(
        plan=plan,
        episodes=(
            episode(plan.episodes[0], 1.0),
            episode(plan.episodes[1], 0.0, trajectory=None),
        ),
        dead=(DeadEpisode(plan=plan.episodes[2], version=0, reason="x"),),
    )
    found = batch([mixed])
    assert [row.advantage for row in found.rows] == [0.5]


def test_plan_is_a_function_of_the_seed():
    families = ["a", "b", "c"]
    first, again = (plan_group(CONFIG, families, 4) for _ in range(2))
    assert first == again
    assert first.family == "b"
    assert len({one.task_seed for one in first.episodes}) == 1
    assert len({one.policy_seed for one in first.episodes}) == 8
    ids = {one.episode_id for i in range(6) for one in plan_group(CONFIG, families, i).episodes}
    assert len(ids) == 48
    seeds = {plan_group(CONFIG, families, i).seed for i in range(6)}
    assert len(seeds) == 6


def test_arms_meet_the_same_tasks():
    first, second = (
        measurement_group(7, arm=arm, step=0, family="triage", episodes=4) for arm in ("a", "b")
    )
    assert [(one.task_seed, one.policy_seed) for one in first.episodes] == [
        (one.task_seed, one.policy_seed) for one in second.episodes
    ]
    assert first.group_id != second.group_id


def test_warm_up_rises_to_the_full_rate():
    rates = [OuterConfig(learning_rate=0.3, warmup_updates=2).learning_rate_at(i) for i in range(4)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.3])
