"""Our episodes for a foreign training loop: what is played, and what it pays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from nestling.agent.chat_template import ChatTemplate
from nestling.agent.episode_result import EpisodeResult
from nestling.agent.policy import Policy
from nestling.agent.token_policy import TokenPolicy
from nestling.outer.bridge.inversion import BridgeSampler
from nestling.outer.config import OuterConfig
from nestling.outer.plan import EpisodePlan

__all__ = ["FAULT_REWARD", "EpisodePay", "Play", "pay_of", "plays_of"]

FAULT_REWARD: Final = -0.1
"""For an episode that the machinery killed: a loop that trains on every member needs a number."""

Play = Callable[[BridgeSampler], Awaitable["EpisodePay"]]
"""One episode; its turns come from the sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePay:
    """What a training loop is told of an episode that ended."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)


def pay_of(result: EpisodeResult) -> EpisodePay:
    """Reward and facts of a result; a fault of the machinery is paid `FAULT_REWARD`."""
    metrics = {
        f"outcome/{result.outcome_code}": 1.0,
        "episode/turns": float(result.num_turns),
        "episode/attempts": float(len(result.attempts)),
        "episode/valid": float(result.valid_attempt is not None),
    }
    reward = FAULT_REWARD if result.is_fault else result.reward
    return EpisodePay(reward=reward, metrics=metrics, logs={"outcome": result.detail[:500]})


def plays_of(
    play_policy: Callable[[EpisodePlan, Policy], Awaitable[EpisodeResult]],
    chat: ChatTemplate,
    config: OuterConfig,
) -> Callable[[EpisodePlan], Play]:
    """Planned episodes of our harness, every turn asked of the loop that drives them.

    Log-probabilities are the loop's business: those in the results are zeros.
    """

    def make(plan: EpisodePlan) -> Play:
        async def play(sampler: BridgeSampler) -> EpisodePay:
            policy = TokenPolicy(
                tokenizer=chat.tokenizer,
                sampler=sampler,
                chat=chat,
                temperature=config.temperature,
                max_turn_tokens=config.max_turn_tokens,
                max_total_tokens=config.max_total_tokens,
            )
            return pay_of(await play_policy(plan, policy))

        return play

    return make
