"""A small run of real episodes in a process of its own, to be killed: `killed_turns.py FOLDER`.

An untrained model plays the agent's harness: six turns, each too long, so each is answered. It is
paid for tokens with an even id. Prints a line per turn and, at the end, the hash of the weights.
Every sampled turn leaves a line in FOLDER/sampled.txt.
"""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from nestling.agent.episode import EpisodeLimits, EpisodeTask
from nestling.config import AgentConfig
from nestling.core.clock import SystemClock
from nestling.core.errors import FleetError
from nestling.engine.config import ModelConfig
from nestling.engine.model import Model
from nestling.engine.tokenizer import Tokenizer
from nestling.engine.weights import Weights
from nestling.families import registry
from nestling.outer.config import EmbeddedConfig, HeldOutConfig, OuterConfig
from nestling.outer.learners.embedded import EmbeddedLearner
from nestling.outer.loop import train
from nestling.outer.player import AgentPlayer
from nestling.outer.store_log import StoreLog
from nestling.store.group_commit import GroupCommit
from nestling.store.run_store import RunStore
from nestling.wiring.agents import agent_folder

MAX_TOKENS = 3_000
NUM_TURNS = 6


class NoMachines:
    """A machine room that is closed; nobody here gets that far."""

    async def check(self, bundle, family):
        raise FleetError("closed")

    async def run(self, bundle, family):
        raise FleetError("closed")

    async def baselines(self, family):
        raise FleetError("closed")


class CountedLearner(EmbeddedLearner):
    """Writes down each turn it has sampled."""

    def __init__(self, model, folder, **rest):
        super().__init__(model, folder, **rest)
        self.path = folder.parent / "sampled.txt"
        self.gate = None
        """Called with the session before a turn is sampled; may hold it."""

    async def sample(self, handle, ids, *, session, seed, max_tokens, temperature):
        if self.gate is not None:
            await self.gate(session)
        answer = await super().sample(
            handle,
            ids,
            session=session,
            seed=seed,
            max_tokens=max_tokens,
            temperature=temperature,
        )
        with self.path.open("a") as file:
            file.write(f"{session} {seed} {handle.version}\n")
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class PaidPlayer(AgentPlayer):
    """Pays the share of sampled tokens with an even id."""

    async def play(self, plan, handle):
        result = await AgentPlayer.play(self, plan, handle)
        chosen = [
            token
            for token, is_sampled in zip(
                result.trajectory.ids, result.trajectory.sampled, strict=True
            )
            if is_sampled
        ]
        share = sum(token % 2 == 0 for token in chosen) / len(chosen)
        return result.model_copy(update={"reward": share})


def config(**changes):
    given = {
        "seed": 5,
        "steps": 3,
        "groups_per_step": 1,
        "group_size": 3,
        "max_staleness": 0,
        "max_parallel_episodes": 1,
        "learning_rate": 3e-3,
        "max_turn_tokens": 8,
        "max_total_tokens": MAX_TOKENS,
        "held_out": HeldOutConfig(every_steps=0, resamples=100),
    }
    return OuterConfig(**(given | changes))


def open_learner(folder, **changes):
    tokenizer = Tokenizer.load(agent_folder(AgentConfig().model))
    shape = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_positions=MAX_TOKENS,
    )
    weights = Weights.init(shape, 1, torch.Generator().manual_seed(0))
    return CountedLearner(
        Model(config=shape, weights=weights, tokenizer=tokenizer),
        folder / "learner",
        max_total_tokens=MAX_TOKENS,
        config=EmbeddedConfig(**({"num_sessions": 1, "lockstep": True} | changes)),
    )


def make_task(plan):
    return EpisodeTask(
        family=registry.get(plan.family),
        task_id=plan.episode_id,
        task_seed=plan.task_seed,
        policy_seed=plan.policy_seed,
        limits=EpisodeLimits(max_malformed_calls=NUM_TURNS, num_examples=0),
    )


async def play_run(folder, settings, learner, *, events=None, **hooks):
    """One try at the run; resumes what is in the folder."""
    with RunStore(folder / "run.db") as store, GroupCommit(store) as writer:
        log = StoreLog(writer)
        player = PaidPlayer(
            learner=learner,
            tokenizer=learner.tokenizer,
            make_runner=lambda plan: NoMachines(),
            make_task=make_task,
            config=settings,
            turn_log=log.turn_log,
            events=events,
        )
        return await train(
            settings,
            learner=learner,
            player=player,
            log=log,
            families=["ledger"],
            clock=SystemClock(),
            open_policy=learner.open_policy,
            **hooks,
        )


async def main(folder):
    torch.set_num_threads(1)
    learner = open_learner(folder)
    await play_run(
        folder,
        config(),
        learner,
        events=lambda event: print(event.task_id, event.kind, flush=True),
    )
    print((await learner.publish()).model.weights.content_hash(), flush=True)
    learner.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
