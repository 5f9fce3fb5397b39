"""What an episode needs of an agent: text out, tool results in.

Any model, script or remote endpoint is a `Policy`. Token ids are optional: only a policy that is to be
trained records them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nestling.agent.prompt import AgentPrompt
from nestling.core.errors import NestlingError
from nestling.core.frozen import Frozen

__all__ = ["AgentTurn", "ContextFullError", "Policy", "PolicySession", "Trajectory"]


class ContextFullError(NestlingError):
    """The history has no room for another turn; the episode ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTurn:
    """One turn of the agent."""

    text: str
    """Without the turn end marker."""
    ids: tuple[int, ...] = ()
    """Sampled tokens, the turn end included; empty for policies without tokens."""
    logprobs: tuple[float, ...] = ()
    """Of the sampling distribution, one per id."""
    truncated: bool = False
    """The turn was cut before the model ended it."""


class Trajectory(Frozen):
    """The whole episode as tokens, exactly as they were sampled and fed."""

    ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    """True on tokens the policy sampled, False on prompt, glue and tool results."""
    logprobs: tuple[float, ...]
    """Of the sampling distribution; 0.0 on tokens that were fed."""
    prompt_len: int
    temperature: float


class PolicySession(Protocol):
    """One episode of one policy. Calls alternate: act or replay, observe, ...; close ends it.

    `act` raises `ContextFullError` when there is no room, `NestlingError` or `OSError` when the
    policy is dead; anything else counts as a bug and stops the run.
    """

    async def act(self) -> AgentTurn:
        """The next turn."""
        ...

    async def replay(self, turn: AgentTurn) -> AgentTurn | None:
        """Take over a recorded turn in place of `act`; the turn as `act` gave it then.

        None when this session could not have said it: nothing is taken over, and `act` goes on.
        """
        ...

    async def observe(self, tool_result: str) -> None:
        """Append what the tool answered to the last turn."""
        ...

    def close(self) -> None:
        """Free what the session holds; may be called twice, never blocks."""
        ...

    def trajectory(self) -> Trajectory | None:
        """All tokens so far, also after close; None for policies without tokens."""
        ...


class Policy(Protocol):
    """An agent; may play many sessions at once."""

    def begin(self, prompt: AgentPrompt, seed: int) -> PolicySession:
        """A session whose randomness comes from `seed` alone."""
        ...
