"""The shipped agent behind our own server says what it says in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nestling.agent.episode import EpisodeTask, run_episode
from nestling.agent.episode_result import EpisodeResult
from nestling.agent.policies.endpoint import EndpointPolicy
from nestling.agent.policies.endpoint_config import EndpointConfig
from nestling.agent.policy import Policy
from nestling.agent.token_policy import TokenPolicy
from nestling.core.clock import SystemClock
from nestling.engine.checkpoint import load_model
from nestling.engine.serve import ChatServer, ServeConfig, shows_tools
from nestling.families.registry import ALL, get
from nestling.outer.config import EmbeddedConfig
from nestling.outer.learners.embedded import EmbeddedLearner
from nestling.outer.player import HandleSampler
from nestling.wiring.agents import agent_folder

MAX_TURN_TOKENS, MAX_TOTAL_TOKENS = 512, 2048


@asynccontextmanager
async def embedded(folder: Path, temperature: float) -> AsyncIterator[Policy]:
    learner = EmbeddedLearner(
        load_model(agent_folder("hatchling")),
        folder,
        max_total_tokens=MAX_TOTAL_TOKENS,
        config=EmbeddedConfig(num_sessions=2),
    )
    try:
        yield TokenPolicy(
            tokenizer=learner.tokenizer,
            sampler=HandleSampler(learner, await learner.publish()),
            temperature=temperature,
            max_turn_tokens=MAX_TURN_TOKENS,
            max_total_tokens=MAX_TOTAL_TOKENS,
        )
    finally:
        learner.close()


@asynccontextmanager
async def served(temperature: float) -> AsyncIterator[Policy]:
    folder = agent_folder("hatchling")
    server = ChatServer(
        load_model(folder),
        ServeConfig(
            name="hatchling", port=0, max_len=MAX_TOTAL_TOKENS, shows_tools=shows_tools(folder)
        ),
        SystemClock(),
    )
    try:
        async with server.listening() as url:
            config = EndpointConfig(
                url=url,
                model="hatchling",
                temperature=temperature,
                max_turn_tokens=MAX_TURN_TOKENS,
            )
            async with EndpointPolicy.opened(config, environment={}) as policy:
                yield policy
    finally:
        server.close()


async def episodes(policy: Policy, runner, seeds) -> list[EpisodeResult]:
    return [
        await run_episode(
            EpisodeTask(
                family=get(family), task_id=f"{family}-{seed}", task_seed=seed, policy_seed=seed
            ),
            policy,
            runner,
        )
        for family, seed in seeds
    ]


def without_tokens(result: EpisodeResult) -> dict[str, object]:
    left_out = {"trajectory", "seconds", "sampled_tokens", "total_tokens", "turns"}
    turns = [turn.model_dump(exclude={"tokens"}) for turn in result.turns]
    return {**result.model_dump(exclude=left_out), "turns": turns}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("temperature", "seeds"),
    [
        (0.0, [("ledger", 1)]),
        pytest.param(
            0.0, [("calc_chain", 2), ("triage", 5), ("dispatch", 6)], marks=pytest.mark.slow
        ),
        pytest.param(0.7, [(f, n) for n, f in enumerate(ALL, start=3)], marks=pytest.mark.slow),
    ],
)
async def test_same_turns_through_http_and_in_this_process(
    tmp_path: Path, make_runner, temperature: float, seeds
) -> None:
    async with embedded(tmp_path, temperature) as policy:
        own = await episodes(policy, make_runner(), seeds)
    async with served(temperature) as policy:
        remote = await episodes(policy, make_runner(), seeds)
    assert [without_tokens(one) for one in remote] == [without_tokens(one) for one in own]
    assert sum(one.num_turns for one in own) >= 2
