"""The loop with our engine as learner and the agent's own token policy."""

import asyncio
import contextlib
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nestling.agent.prompt import AgentPrompt
from nestling.agent.token_policy import TokenPolicy
from nestling.core.clock import SystemClock
from nestling.outer.config import HeldOutConfig, OuterConfig
from nestling.outer.loop import train
from nestling.outer.player import HandleSampler
from nestling.outer.store_log import StoreLog
from nestling.store.group_commit import GroupCommit
from nestling.store.run_store import RunStore

PROMPT = AgentPrompt(system="ann", user="bob", tool_schemas=(), style="compact", family="ledger")


class WordGame:
    """Two turns of at most six tokens; pays the share of sampled tokens with an even id."""

    def __init__(self, learner, tokenizer, make_result):
        self.learner = learner
        self.tokenizer = tokenizer
        self.make_result = make_result

    async def play(self, plan, handle):
        policy = TokenPolicy(
            tokenizer=self.tokenizer,
            sampler=HandleSampler(self.learner, handle, session_prefix=plan.episode_id),
            temperature=0.7,
            max_turn_tokens=6,
            max_total_tokens=90,
        )
        session = policy.begin(PROMPT, plan.policy_seed)
        first = await session.act()
        await session.observe("bob")
        second = await session.act()
        session.close()
        chosen = [*first.ids, *second.ids]
        share = sum(token % 2 == 0 for token in chosen) / len(chosen)
        return self.make_result(plan, share, session.trajectory())


def config(**changes):
    given = {
        "seed": 1,
        "steps": 12,
        "groups_per_step": 2,
        "group_size": 8,
        "max_staleness": 0,
        "learning_rate": 3e-3,
        "max_turn_tokens": 6,
        "max_total_tokens": 90,
        "held_out": HeldOutConfig(every_steps=0, resamples=100),
    }
    return OuterConfig(**(given | changes))


async def run(settings, learner, player, store, **hooks):
    with GroupCommit(store) as writer:
        return await train(
            settings,
            learner=learner,
            player=player,
            log=StoreLog(writer),
            families=["ledger"],
            clock=SystemClock(),
            **hooks,
        )


@pytest.mark.long
async def test_agent_learns_the_game(embedded, make_result, store, tokenizer):
    learner = embedded(num_sessions=32)
    reports = []
    player = WordGame(learner, tokenizer, make_result)
    settings = config(steps=30, learning_rate=1e-2)
    await run(settings, learner, player, store, on_step=reports.append)
    rewards = [report.summary.reward.mean for report in reports]
    assert rewards[0] < 0.6  # half of all tokens pay
    assert rewards[-1] > 0.75
    updates = [report.update for report in reports]
    assert all(update.max_logprob_gap < 1e-4 for update in updates)
    assert updates[-1].kl_initial > updates[1].kl_initial > 0
    assert updates[-1].nll < updates[0].nll


async def cut_after(number, settings, learner, player, store):
    """Cancel the run when this many episodes are finished in the store."""
    tasks = []

    def look(episode):
        if len(store.episodes.all(state="finished")) >= number:
            tasks[0].cancel()

    async with asyncio.TaskGroup() as group:
        tasks.append(group.create_task(run(settings, learner, player, store, on_episode=look)))
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[0]


@pytest.mark.long
async def test_resumed_run_has_the_same_weights_bit_for_bit(
    embedded, make_result, tmp_path, tokenizer
):
    settings = config(steps=3, groups_per_step=1, group_size=4, max_parallel_episodes=3)
    hashes, episodes = [], []
    for name, cuts in (("calm", ()), ("cut", (2, 5, 6, 11))):
        with RunStore(tmp_path / f"{name}.db") as store:
            for number in cuts:
                learner = embedded(folder=name, lockstep=True)
                player = WordGame(learner, tokenizer, make_result)
                await cut_after(number, settings, learner, player, store)
                learner.close()
            learner = embedded(folder=name, lockstep=True)
            await run(settings, learner, WordGame(learner, tokenizer, make_result), store)
            hashes.append((await learner.publish()).model.weights.content_hash())
            episodes.append(
                [
                    (one.id, store.episodes.trajectory(one.id))
                    for one in sorted(store.episodes.all(state="finished"), key=lambda e: e.id)
                ]
            )
    assert hashes[0] == hashes[1]
    assert episodes[0] == episodes[1]
    assert len(episodes[0]) == 12


def start(folder):
    folder.mkdir(exist_ok=True)
    script = Path(__file__).with_name("killed_run.py")
    return subprocess.Popen(
        [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_run_ends_as_if_nothing_had_happened(tmp_path):
    with start(tmp_path / "calm") as calm:
        *episodes, expected = calm.communicate()[0].split()
    assert len(episodes) == 16
    rng = random.Random(0)
    seen = []
    for _ in range(4):
        with start(tmp_path / "killed") as process:
            seen += [process.stdout.readline().strip() for _ in range(rng.randint(1, 4))]
            time.sleep(rng.random() * 0.05)
            process.kill()
            seen += process.stdout.read().split()
    with start(tmp_path / "killed") as process:
        *rest, found = process.communicate()[0].split()
    assert process.returncode == 0
    assert found == expected
    # Each episode is told of at most once, and those killed while being told are not repeated.
    told = [line for line in seen + rest if line.startswith("train/")]
    assert len(told) == len(set(told))
    assert set(told) <= set(episodes)
    with RunStore(tmp_path / "killed/run.db") as store:
        assert len(store.episodes.all(state="finished")) == 16
