"""Planned episodes through the agent's real harness."""

import asyncio

import pytest
import torch

from nestling.agent.agent_tokenizer import train_tokenizer
from nestling.agent.episode import EpisodeTask
from nestling.agent.policies.scripted import scripted
from nestling.core.clock import SystemClock
from nestling.core.errors import FleetError, LearnerError
from nestling.engine.config import ModelConfig
from nestling.engine.model import Model
from nestling.engine.weights import Weights
from nestling.families import registry
from nestling.outer.batch import PlayedEpisode
from nestling.outer.config import HeldOutConfig, OuterConfig
from nestling.outer.heldout import Arm, sweep
from nestling.outer.learners.embedded import EmbeddedLearner
from nestling.outer.loop import train
from nestling.outer.plan import plan_group
from nestling.outer.player import AgentPlayer
from nestling.outer.store_log import StoreLog, step_reports

CONFIG = OuterConfig(
    steps=2,
    groups_per_step=2,
    group_size=2,
    max_staleness=0,
    max_turn_tokens=8,
    max_total_tokens=1024,
    held_out=HeldOutConfig(every_steps=0, episodes=2, resamples=100),
)


class NoMachines:
    """A machine room that is closed; an untrained agent never gets that far."""

    async def check(self, bundle, family):
        raise FleetError("closed")

    async def run(self, bundle, family):
        raise FleetError("closed")

    async def baselines(self, family):
        raise FleetError("closed")


def make_task(plan):
    return EpisodeTask(
        family=registry.get(plan.family),
        task_id=plan.episode_id,
        task_seed=plan.task_seed,
        policy_seed=plan.policy_seed,
    )


@pytest.fixture
def learner(tmp_path):
    tokenizer = train_tokenizer(["family: ledger\n"] * 30, vocab_size=512)
    config = ModelConfig(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_positions=1024,
    )
    weights = Weights.init(config, 1, torch.Generator().manual_seed(0))
    model = Model(config=config, weights=weights, tokenizer=tokenizer)
    made = EmbeddedLearner(model, tmp_path / "states", max_total_tokens=1024)
    yield made
    made.close()


@pytest.fixture
def player(learner):
    return AgentPlayer(
        learner=learner,
        tokenizer=learner.tokenizer,
        make_runner=lambda plan: NoMachines(),
        make_task=make_task,
        config=CONFIG,
    )


async def test_untrained_episodes_are_real_and_teach_nothing(learner, player, store, writer):
    seen = []
    await train(
        CONFIG,
        learner=learner,
        player=player,
        log=StoreLog(writer),
        families=registry.TRAINING,
        clock=SystemClock(),
        on_episode=seen.append,
    )
    reports = step_reports(store)
    assert [report.skipped for report in reports] == [True, True]
    assert reports[0].summary.reward.mean == pytest.approx(-0.1)
    assert reports[0].summary.validity == 0.0
    families = {one.plan.group_id: one.result.family for one in seen}
    assert [families[name] for name in sorted(families)] == list(registry.TRAINING[:4])
    trajectory = seen[0].result.trajectory
    assert sum(trajectory.sampled) == seen[0].result.sampled_tokens > 0
    kept = await StoreLog(writer).finished_episodes([])
    assert kept == []


async def test_what_is_stored_is_what_was_played(learner, player, store, writer):
    log = StoreLog(writer)
    group = plan_group(CONFIG, registry.TRAINING, 0)
    await log.group_opened(group)
    plan = group.episodes[0]
    await log.episode_started(plan, 0)
    result = await player.play(plan, await learner.publish())
    played = PlayedEpisode(plan=plan, version=0, result=result)
    await log.episode_finished(played)
    assert await log.finished_episodes([group]) == [played]


async def test_learner_that_cannot_sample_stops_the_run(learner, player):
    handle = await learner.publish()
    learner.close()
    with pytest.raises(LearnerError):
        await player.play(plan_group(CONFIG, registry.TRAINING, 0).episodes[0], handle)


async def test_sweep_of_a_checkpoint_and_a_script(learner, player, writer):
    ref = await learner.save("step-000000")
    policy = await learner.open_policy(ref)

    async def checkpoint(plan):
        return await player.play(plan, policy)

    async def silent(plan):
        return await player.play_policy(plan, scripted("noop"))

    arms = [Arm(name="untrained", play=checkpoint), Arm(name="noop", play=silent)]
    async with asyncio.timeout(60):
        found = await sweep(
            arms,
            registry.HELD_OUT,
            config=CONFIG.held_out,
            seed=1,
            log=StoreLog(writer),
            against=["noop"],
        )
    assert found.result("untrained").summary.reward.mean == pytest.approx(-0.1)
    # The machine room is closed: the script's episodes are deaths, not zeros.
    assert found.result("noop").dead == 2
    assert found.comparison("untrained", "noop") is None
