"""Play one planned episode, record it, and keep its death to itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from nestling.agent.episode_result import EpisodeResult
from nestling.core.errors import ConfigError, LearnerError, StoreError
from nestling.outer.batch import DeadEpisode, PlayedEpisode
from nestling.outer.learner import Handle
from nestling.outer.plan import EpisodePlan
from nestling.outer.run_log import RunLog

__all__ = ["ChoosePolicy", "EpisodePlayer", "OnEpisode", "PlayPlan", "Stage", "first_leaf"]

logger = logging.getLogger(__name__)

PlayPlan = Callable[[EpisodePlan], Awaitable[EpisodeResult]]
"""Plays one episode with one policy.

`LearnerError`, `StoreError` and `ConfigError` stop the run; any other exception, and a result that is
the machinery's fault, is the death of this episode alone.
"""
ChoosePolicy = Callable[[], Awaitable[tuple[int, PlayPlan]]]
"""Version and player of an episode."""
OnEpisode = Callable[[PlayedEpisode | DeadEpisode], None]

_REASON_CHARS = 500


class EpisodePlayer(Protocol):
    """Plays episodes with published policies; `AgentPlayer` is the real one."""

    async def play(self, plan: EpisodePlan, handle: Handle) -> EpisodeResult:
        """The episode's result with its tokens; exceptions as for `PlayPlan`."""
        ...


class Stage:
    """A bounded number of places; episodes wait for one in the order they came."""

    def __init__(
        self,
        log: RunLog,
        *,
        max_parallel_episodes: int,
        episode_timeout_s: float,
        on_episode: OnEpisode | None = None,
    ) -> None:
        self._log = log
        self._places = asyncio.Semaphore(max_parallel_episodes)
        self._timeout_s = episode_timeout_s
        self._on_episode = on_episode

    async def play(self, plan: EpisodePlan, policy: ChoosePolicy) -> PlayedEpisode | DeadEpisode:
        """Wait for a place, ask `policy` for version and player, play, record.

        Cancelled while it plays, the episode stays recorded as started; later it goes on after its
        last recorded turn if `policy` gives the version that said it, else from its start.
        """
        async with self._places:
            version, play = await policy()
            await self._log.episode_started(plan, version)
            episode = await self._outcome(plan, version, play)
            if isinstance(episode, PlayedEpisode):
                await self._log.episode_finished(episode)
            else:
                await self._log.episode_died(episode)
            if self._on_episode is not None:
                self._on_episode(episode)
            return episode

    async def _outcome(
        self, plan: EpisodePlan, version: int, play: PlayPlan
    ) -> PlayedEpisode | DeadEpisode:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                result = await play(plan)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Nobody cancelled this episode: something it waited for was cancelled.
            reason = "what the episode waited for was cancelled"
            return DeadEpisode(plan=plan, version=version, reason=reason)
        except (LearnerError, StoreError, ConfigError):
            raise
        except Exception as error:
            # The agent's text reaches every line of an episode: whatever one input can break costs
            # that episode, not the run. The record and the log keep the evidence.
            logger.exception("episode %s died", plan.episode_id)
            reason = f"{type(error).__name__}: {error}"[:_REASON_CHARS]
            if limit.expired():
                reason = f"took longer than episode_timeout_s={self._timeout_s:g}"
            return DeadEpisode(plan=plan, version=version, reason=reason)
        if result.is_fault:
            logger.error("episode %s died: %s", plan.episode_id, result.outcome_code)
            reason = f"{result.outcome_code}: {result.detail}"[:_REASON_CHARS]
            return DeadEpisode(plan=plan, version=version, reason=reason)
        return PlayedEpisode(plan=plan, version=version, result=result)


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that stopped a task group; the others are its consequences."""
    first = group.exceptions[0]
    return first_leaf(first) if isinstance(first, BaseExceptionGroup) else first
