"""What a trainer needs of an environment: rows, tools and scores, in batches.

Implemented in this process (`verifiers_host`) and by a jailed child (`env_client`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

__all__ = [
    "CallRequest",
    "FinalRequest",
    "RolloutEnv",
    "RolloutStart",
    "Row",
    "ScoreRecord",
    "StopReason",
]

StopReason = Literal["done", "max_turns", "max_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training row as the environment declares it."""

    index: int
    system_prompt: str
    prompt: str
    data_json: str
    """The whole row as JSON, for the leak scan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStart:
    """A fresh rollout: its id and what the model is shown first."""

    rollout_id: int
    system_prompt: str
    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """One turn of the model that asks for a tool."""

    rollout_id: int
    text: str
    """The model's whole turn, as sampled."""
    name: str
    arguments: dict[str, Any]
    malformed: str | None = None
    """Why the turn is no proper call; nothing is called and the answer says so."""
    prompt_tokens: int = 0
    """Tokens the model had read before this turn."""
    completion_tokens: int = 0
    """Tokens of this turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalRequest:
    """The end of a rollout; `text` is the last turn, empty when the last turn was a tool call."""

    rollout_id: int
    text: str
    stop: StopReason
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRecord:
    """What the rubric said of one rollout."""

    reward: float
    """Weighted sum; finite."""
    rewards: dict[str, float] = field(default_factory=dict)
    """What each reward function added, its weight included."""
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    """Why scoring failed; the reward is then 0.0."""


class RolloutEnv(Protocol):
    """Synchronous and batched; every call may raise `JailError` with a reason code."""

    def rows(self, limit: int) -> list[Row]:
        """The first `limit` rows of the data set."""
        ...

    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools in OpenAI function-schema form."""
        ...

    def reset(self, rows: Sequence[int]) -> list[RolloutStart]:
        """Start one rollout per entry; the same row may appear many times."""
        ...

    def step(self, calls: Sequence[CallRequest]) -> list[str | None]:
        """Run tool calls, each in its own rollout's state; tool errors come back as text.

        None where the task's own stop condition ends the rollout: score it with an empty text.
        """
        ...

    def score(self, finals: Sequence[FinalRequest]) -> list[ScoreRecord]:
        """End rollouts and score them; their state is freed."""
        ...

    def close(self) -> None:
        """Free everything; may be called twice."""
        ...
