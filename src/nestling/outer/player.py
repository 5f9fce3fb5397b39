"""The real episode player: the learner's published policy in the agent's harness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nestling.agent.episode import EpisodeTask, EventSink, run_episode
from nestling.agent.episode_result import EpisodeResult
from nestling.agent.job_runner import JobRunner
from nestling.agent.policy import Policy
from nestling.agent.token_policy import ChatFormat, TokenPolicy
from nestling.agent.turn_log import TurnLog
from nestling.core.clock import Clock
from nestling.core.errors import LearnerError
from nestling.engine.tokenizer import Tokenizer
from nestling.outer.config import OuterConfig
from nestling.outer.learner import Handle, Learner, Sampled
from nestling.outer.plan import EpisodePlan

__all__ = ["AgentPlayer", "HandleSampler", "MakeRunner", "MakeTask", "MakeTurnLog"]

MakeTask = Callable[[EpisodePlan], EpisodeTask]
"""Fills in family, rules and limits for a planned episode."""
MakeRunner = Callable[[EpisodePlan], JobRunner]
"""The machine room as this episode sees it, so that its jobs are accounted to it."""
MakeTurnLog = Callable[[EpisodePlan], TurnLog]
"""The memory of a planned episode's turns."""


class HandleSampler:
    """One published policy as the agent's `TokenSampler`; remembers why sampling failed."""

    def __init__(self, learner: Learner, handle: Handle, *, session_prefix: str = "") -> None:
        self._learner = learner
        self._handle = handle
        self._prefix = session_prefix
        self.error: LearnerError | None = None

    async def sample(
        self, ids: Sequence[int], *, session: str, seed: int, max_tokens: int, temperature: float
    ) -> Sampled:
        """Continue `ids`; see `Learner.sample`."""
        try:
            return await self._learner.sample(
                self._handle,
                ids,
                session=self._prefix + session,
                seed=seed,
                max_tokens=max_tokens,
                temperature=temperature,
            )
        except LearnerError as error:
            self.error = error
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlayer:
    """Plays planned episodes with any policy; `play` is the one the loop calls."""

    learner: Learner
    tokenizer: Tokenizer
    make_runner: MakeRunner
    make_task: MakeTask
    config: OuterConfig
    chat: ChatFormat | None = None
    """How the model reads a conversation; None: our own dialect."""
    turn_log: MakeTurnLog | None = None
    """None: turns are not recorded, and an episode that was cut off begins again."""
    events: EventSink | None = None
    clock: Clock | None = None

    async def play(self, plan: EpisodePlan, handle: Handle) -> EpisodeResult:
        """One episode of a published policy; a learner that cannot sample raises `LearnerError`."""
        # Episodes of one task may share seeds across arms: the id keeps their sessions apart.
        sampler = HandleSampler(self.learner, handle, session_prefix=f"{plan.episode_id}:")
        policy = TokenPolicy(
            tokenizer=self.tokenizer,
            sampler=sampler,
            chat=self.chat,
            temperature=self.config.temperature,
            max_turn_tokens=self.config.max_turn_tokens,
            max_total_tokens=self.config.max_total_tokens,
        )
        result = await self.play_policy(plan, policy)
        if sampler.error is not None:
            # The harness takes it for the death of the policy; for a run it is the end.
            raise sampler.error
        return result

    async def play_policy(self, plan: EpisodePlan, policy: Policy) -> EpisodeResult:
        """One episode of any policy, for example a reference one."""
        return await run_episode(
            self.make_task(plan),
            policy,
            self.make_runner(plan),
            turn_log=None if self.turn_log is None else self.turn_log(plan),
            events=self.events,
            clock=self.clock,
        )
