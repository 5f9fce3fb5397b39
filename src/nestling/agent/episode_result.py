"""The record of one episode: everything that a report, a resume or a learner may ask for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nestling.agent.attempt import AttemptRecord, ManifestSummary
from nestling.agent.policy import Trajectory
from nestling.agent.reward import RewardKind, Terms
from nestling.core.frozen import Frozen
from nestling.jobs.outcome import Outcome

__all__ = ["FAULT_CODES", "EpisodeResult", "OutcomeCode", "TurnRecord"]

OutcomeCode = Literal[
    "job_succeeded",
    "job_failed",
    "job_timed_out",
    "job_lost",
    "attempts_used_up",
    "max_turns",
    "no_call",
    "malformed_calls",
    "context_full",
    "policy_failed",
    "policy_timed_out",
    "runner_failed",
    "runner_timed_out",
    "workspace_failed",
]
"""Why the episode ended. job_*: a job was accepted and this became of it; the next five: the agent
never got a job accepted; the last five: the machinery under the episode died."""

FAULT_CODES: frozenset[OutcomeCode] = frozenset(
    {"policy_failed", "policy_timed_out", "runner_failed", "runner_timed_out", "workspace_failed"}
)


class TurnRecord(Frozen):
    """One entry of the transcript; tool results stand with the turn that asked."""

    role: Literal["system", "user", "assistant"]
    text: str
    tool: str | None = None
    """Tool asked for; None for prompts, final answers and malformed calls."""
    result: str | None = None
    """What the tool answered, or the error a malformed call got."""
    tokens: int = 0
    """Sampled tokens; 0 for policies without tokens."""
    truncated: bool = False


class EpisodeResult(Frozen):
    """One episode, from prompt to reward."""

    family: str
    task_id: str
    task_seed: int
    policy_seed: int
    reward_kind: RewardKind
    """Which of the two rewards is `reward`."""
    reward: float
    terms: dict[RewardKind, Terms]
    """Both rewards, always."""
    outcome_code: OutcomeCode
    detail: str = ""
    """A reason code of the job or one line about what died."""
    attempts: tuple[AttemptRecord, ...] = ()
    valid_attempt: int | None = None
    """The attempt that passed the probe, from 1."""
    manifest: ManifestSummary | None = None
    """Of the accepted job, else of the last submission that obeyed the schema."""
    outcome: Outcome | None = None
    turns: tuple[TurnRecord, ...] = ()
    """The transcript: system, user, then the agent's turns."""
    num_turns: int = 0
    """Turns of the agent."""
    sampled_tokens: int = 0
    total_tokens: int = 0
    """Prompt, turns and tool results; 0 for policies without tokens."""
    trajectory: Trajectory | None = None
    seconds: float = Field(0.0, ge=0)
    """Wall-clock time, the job included."""

    @property
    def is_fault(self) -> bool:
        """The machinery died, not the agent: show it, but do not train on its reward."""
        return self.outcome_code in FAULT_CODES
