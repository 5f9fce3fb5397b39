import asyncio
import contextlib
import logging
import signal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError, FleetError, LearnerError, StoreError
from nestling.outer.batch import DeadEpisode
from nestling.outer.config import HeldOutConfig, OuterConfig
from nestling.outer.loop import train
from nestling.outer.plan import plan_group
from nestling.outer.run_log import Progress
from nestling.outer.store_log import StoreLog, checkpoints, step_reports
from nestling.store.group_commit import GroupCommit
from nestling.store.run_store import RunStore

FAMILIES = ["ledger", "dispatch"]


def config(**changes):
    given = {"seed": 3, "steps": 4, "groups_per_step": 2, "group_size": 4, "max_staleness": 0}
    given["held_out"] = HeldOutConfig(every_steps=0, resamples=100)
    return OuterConfig(**(given | changes))


async def run(settings, learner, player, store, **hooks):
    with GroupCommit(store) as writer:
        return await train(
            settings,
            learner=learner,
            player=player,
            log=StoreLog(writer),
            families=FAMILIES,
            clock=SystemClock(),
            **hooks,
        )


def group_of(plan):
    return int(plan.group_id.rpartition("/")[2])


def finished(store):
    return sorted(one.id for one in store.episodes.all(state="finished"))


@pytest.mark.long
async def test_reward_rises_above_chance(table_learner, game_player, store):
    learner = table_learner()
    reports = []
    settings = config(steps=25, group_size=8)
    await run(settings, learner, game_player(learner), store, on_step=reports.append)
    first, last = reports[0].summary.reward.mean, reports[-1].summary.reward.mean
    assert first < 0.35  # one token of six pays
    assert last > 0.6
    assert reports[-1].version == 25
    assert reports[-1].staleness_max == 0
    assert step_reports(store) == reports
    saved = checkpoints(store)
    assert [one.version for one in saved] == list(range(26))
    assert saved[-1].step == 25


async def test_dead_episode_costs_only_itself(table_learner, game_player, store, caplog):
    learner = table_learner()

    async def break_one(plan):
        if plan.member == 1 and group_of(plan) % 2:
            raise RuntimeError("the machine caught fire")

    seen, reports = [], []
    player = game_player(learner, before=break_one)
    with caplog.at_level(logging.CRITICAL, logger="nestling"):
        await run(config(), learner, player, store, on_step=reports.append, on_episode=seen.append)
    dead = [one for one in seen if isinstance(one, DeadEpisode)]
    assert [report.dead_episodes for report in reports] == [1] * 4
    assert {one.reason for one in dead} == {"RuntimeError: the machine caught fire"}
    assert len(finished(store)) == 28
    assert len(store.episodes.all(state="failed")) == 4
    assert all(len({row.member for row in rows if row.group % 2}) == 3 for rows in learner.updates)


async def test_run_stops_when_nothing_finishes_any_more(table_learner, game_player, store, caplog):
    learner = table_learner()

    async def break_all(plan):
        raise OSError("no machine")

    with pytest.raises(FleetError, match=r"no machine.*resume"), caplog.at_level(50):
        await run(config(steps=9), learner, game_player(learner, before=break_all), store)
    done = await run(config(steps=9), learner, game_player(learner), store)
    assert done.step == 9


async def test_slow_group_stalls_nobody_and_is_clipped_when_it_is_late(
    table_learner, game_player, store
):
    learner = table_learner()
    release = asyncio.Event()
    reports = []

    async def hold_first_group(plan):
        if group_of(plan) == 0:
            await release.wait()

    def on_step(report):
        reports.append(report)
        if report.step == 4:
            release.set()

    settings = config(steps=6, groups_per_step=1, max_staleness=1, max_parallel_episodes=64)
    player = game_player(learner, before=hold_first_group)
    async with asyncio.timeout(20):
        await run(settings, learner, player, store, on_step=on_step)
    assert [report.step for report in reports] == [1, 2, 3, 4, 5, 6]
    late = [report for report in reports if report.groups.over_stale]
    assert len(late) == 1
    assert late[0].staleness_max >= 3
    kinds = [spec.kind for spec in learner.specs]
    assert kinds.count("ppo_clip") == 1
    assert len(finished(store)) == 24


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
async def test_pace_bounds_what_is_admitted(table_learner, game_player, store, max_staleness):
    learner = table_learner()
    reports, started, most = [], set(), []

    async def before(plan):
        started.add(plan.group_id)
        most.append(len(started) - 2 * len(reports))
        await asyncio.sleep(0.001 * (plan.policy_seed % 5))

    player = game_player(learner, before=before)
    settings = config(steps=8, max_staleness=max_staleness)
    await run(settings, learner, player, store, on_step=reports.append)
    assert max(most) == 2 * (max_staleness + 1)
    if max_staleness == 0:
        assert max(report.staleness_max for report in reports) == 0
    trained = {row.group for rows in learner.updates for row in rows}
    left_out = sum(report.groups.constant for report in reports)
    assert len(trained) + left_out == 16


async def test_constant_groups_make_no_update(table_learner, game_player, store):
    learner = table_learner()
    reports = []
    player = game_player(learner, reward=lambda plan, share: share if group_of(plan) >= 4 else 0.1)
    done = await run(config(), learner, player, store, on_step=reports.append)
    assert [report.skipped for report in reports] == [True, True, False, False]
    assert [report.groups.constant for report in reports[:2]] == [2, 2]
    assert (done.step, done.version, learner.version) == (4, 2, 2)
    states = [(group.state, group.used_in_step) for group in store.progress.groups()]
    assert (
        states
        == [("dropped", 1)] * 2 + [("dropped", 2)] * 2 + [("used", 3)] * 2 + [("used", 4)] * 2
    )
    assert reports[0].update is None
    # The warm-up counts updates, not steps.
    assert reports[2].update.learning_rate == pytest.approx(config().learning_rate_at(0))


async def run_cut(settings, learner, player, store, should_cut):
    """Run, cancelled after the first episode for which `should_cut(episode)`; whether it was."""
    tasks = []

    def look(episode):
        if should_cut(episode):
            tasks[0].cancel()

    async with asyncio.TaskGroup() as group:
        tasks.append(group.create_task(run(settings, learner, player, store, on_episode=look)))
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[0]
    return tasks[0].cancelled()


async def test_resumed_run_equals_an_undisturbed_one(table_learner, game_player, store, tmp_path):
    calm = table_learner()
    calm.folder = tmp_path / "calm"
    calm.folder.mkdir()
    with RunStore(tmp_path / "calm.db") as calm_store:
        await run(config(steps=5), calm, game_player(calm), calm_store)
        expected = finished(calm_store)

    for cut_at in (3, 7, 11, 18, 29, None):
        learner = table_learner()
        was_cut = await run_cut(
            config(steps=5),
            learner,
            game_player(learner),
            store,
            lambda _, cut_at=cut_at: cut_at is not None and len(finished(store)) >= cut_at,
        )
        assert was_cut == (cut_at is not None)
    assert finished(store) == expected
    assert learner.version == calm.version
    np.testing.assert_array_equal(learner.table, calm.table)


async def test_resumed_run_with_lag_plays_the_same_episodes(table_learner, game_player, store):
    settings = config(steps=5, max_staleness=2)
    for cut_at in (2, 9, 17, 30, None):
        learner = table_learner()

        async def dawdle(plan):
            await asyncio.sleep(0.001 * (plan.policy_seed % 7))

        await run_cut(
            settings,
            learner,
            game_player(learner, before=dawdle),
            store,
            lambda _, cut_at=cut_at: cut_at is not None and len(finished(store)) >= cut_at,
        )
    wanted = [
        one.episode_id for i in range(10) for one in plan_group(settings, FAMILIES, i).episodes
    ]
    assert finished(store) == wanted
    assert step_reports(store)[-1].step == 5
    assert sum(len(report.group_fates) for report in step_reports(store)) == 10


async def test_finished_episodes_are_never_played_again(table_learner, game_player, store):
    settings = config(steps=2, groups_per_step=1, max_parallel_episodes=1)
    seen = []

    def note(episode):
        seen.append(episode.plan.episode_id)
        return True

    while True:
        learner = table_learner()
        if not await run_cut(settings, learner, game_player(learner), store, note):
            break
    assert step_reports(store)[-1].step == 2
    assert sorted(seen) == finished(store)
    assert len(seen) == 8


async def test_learner_failure_stops_the_run_as_itself(table_learner, game_player, store):
    learner = table_learner()

    async def no_power(plan):
        raise LearnerError("the device is gone")

    with pytest.raises(LearnerError, match="device is gone"):
        await run(config(), learner, game_player(learner, before=no_power), store)
    assert len(asyncio.all_tasks()) == 1


async def test_hanging_episode_dies_of_its_limit(table_learner, game_player, store, caplog):
    learner = table_learner()

    async def hang(plan):
        if plan.member == 0:
            await asyncio.Event().wait()

    reports = []
    player = game_player(learner, before=hang)
    with caplog.at_level(50):
        settings = config(steps=1, episode_timeout_s=0.05)
        await run(settings, learner, player, store, on_step=reports.append)
    assert reports[0].dead_episodes == 2
    reasons = [one.outcome for one in store.episodes.all(state="failed")]
    assert reasons == ["took longer than episode_timeout_s=0.05"] * 2


async def test_episode_that_waits_for_something_cancelled_dies_alone(
    table_learner, game_player, store
):
    learner = table_learner()

    async def wait_for_the_dead(plan):
        if plan.member == 0:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

    reports = []
    player = game_player(learner, before=wait_for_the_dead)
    async with asyncio.timeout(20):
        await run(config(steps=1), learner, player, store, on_step=reports.append)
    assert (reports[0].episodes, reports[0].dead_episodes) == (6, 2)


async def test_machinery_fault_is_a_death(table_learner, game_player, store, make_result, caplog):
    learner = table_learner()

    class Faulty(game_player):
        async def play(self, plan, handle):
            if plan.member == 0:
                return make_result(plan, 0.0, outcome_code="runner_failed", detail="gone")
            return await super().play(plan, handle)

    reports = []
    with caplog.at_level(50):
        await run(config(steps=1), learner, Faulty(learner), store, on_step=reports.append)
    assert (reports[0].episodes, reports[0].dead_episodes) == (6, 2)


async def test_measures_the_untrained_agent_and_every_few_steps(table_learner, game_player, store):
    learner = table_learner()
    seen = []

    async def measure(step, handle):
        await asyncio.sleep(0.01)
        seen.append((step, handle.version))

    settings = config(steps=5, held_out=HeldOutConfig(every_steps=2, resamples=100))
    await run(settings, learner, game_player(learner), store, measure=measure)
    assert sorted(seen) == [(0, 0), (2, 2), (4, 4), (5, 5)]


async def test_no_families_is_a_config_error(table_learner, game_player, writer):
    learner = table_learner()
    with pytest.raises(ConfigError, match="training families"):
        await train(
            config(), learner=learner, player=game_player(learner), log=StoreLog(writer),
            families=[], clock=SystemClock(),
        )  # fmt: skip


def test_ctrl_c_leaves_a_run_that_resumes(table_learner, game_player, store):
    interrupted = []

    def interrupt(episode):
        if len(finished(store)) >= 13 and not interrupted:
            interrupted.append(True)
            signal.raise_signal(signal.SIGINT)

    learner = table_learner()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run(config(), learner, game_player(learner), store, on_episode=interrupt))
    before = finished(store)
    assert 13 <= len(before) < 32
    learner = table_learner()
    player = game_player(learner)
    asyncio.run(run(config(), learner, player, store))
    assert len(finished(store)) == 32
    assert not set(before) & set(player.played)


async def test_run_may_get_longer_but_not_other(table_learner, game_player, store):
    learner = table_learner()
    await run(config(steps=1), learner, game_player(learner), store)
    learner = table_learner()
    with pytest.raises(ConfigError, match="another plan"):
        await run(config(steps=2, seed=4), learner, game_player(learner), store)
    done = await run(config(steps=2), learner, game_player(learner), store)
    assert done.step == 2


@given(st.lists(st.lists(st.integers(0, 30), max_size=5), max_size=10))
def test_spent_groups_are_remembered(batches):
    progress = Progress(step=0, version=0, learner_ref="", plan="")
    for batch in batches:
        below, beyond = progress.spend(batch)
        progress = progress.model_copy(update={"spent_below": below, "spent_beyond": beyond})
    spent = {group for batch in batches for group in batch}
    assert {group for group in range(40) if progress.is_spent(group)} == spent
    assert progress.spent_below not in spent


async def test_damaged_progress_is_said(store, writer):
    store.set_meta("outer.progress", "{")
    with pytest.raises(StoreError, match="progress"):
        await StoreLog(writer).progress()


async def test_epochs_repeat_the_update_on_the_same_batch(table_learner, game_player, store):
    learner = table_learner()
    reports = []
    settings = config(steps=5, epochs=3, loss="ppo_clip", max_staleness=1)
    await run(settings, learner, game_player(learner), store, on_step=reports.append)
    assert learner.version == reports[-1].version == 15
    for step in range(5):
        first, *others = learner.updates[3 * step : 3 * step + 3]
        assert all(one == first for one in others)
    # Staleness is told in steps, and three updates of one batch do not make the next one too stale.
    assert max(report.staleness_max for report in reports) <= 1
    assert not any(report.groups.over_stale for report in reports)
    rates = [settings.learning_rate_at(update) for update in (2, 5, 8, 11, 14)]
    assert [report.update.learning_rate for report in reports] == rates
    assert abs(reports[1].update.kl_sampler) > 0


def test_epochs_need_a_clipped_loss():
    with pytest.raises(ValidationError, match="expected 'ppo_clip'"):
        config(epochs=2, loss="importance_sampling")
