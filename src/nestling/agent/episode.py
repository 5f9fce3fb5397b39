"""One episode: the agent writes a job, the job is trained, the agent is paid.

Straight-line: prompt, turns until something ends them, the job, the reward. Whatever happens to the
agent, its policy or the machine room becomes the outcome code of the result; only bugs and
cancellation propagate, after the session and the folder are freed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from nestling.agent.call_dialects import parse_agent_turn
from nestling.agent.episode_result import EpisodeResult, OutcomeCode, TurnRecord
from nestling.agent.job_runner import JobRunner
from nestling.agent.policy import AgentTurn, ContextFullError, Policy, PolicySession, Trajectory
from nestling.agent.prompt import AgentPrompt, PromptRules, PromptStyle, render_prompt
from nestling.agent.reward import compute_terms
from nestling.agent.stage import StageFailedError, stage
from nestling.agent.starting_files import episode_examples, template_gaps, workspace_files
from nestling.agent.tools import Accepted, AgentTools, ToolLimits
from nestling.agent.turn_log import TurnFlow, TurnLog, storable
from nestling.agent.workspace import Workspace
from nestling.core.clock import Clock, SystemClock
from nestling.core.frozen import Frozen
from nestling.engine.chat import FinalAnswer, MalformedCall, ToolCall
from nestling.families.family import Family
from nestling.jobs.outcome import Outcome

__all__ = ["EpisodeEvent", "EpisodeLimits", "EpisodeTask", "EventSink", "run_episode"]


_TOOL_LIMITS: dict[PromptStyle, ToolLimits] = {
    "compact": ToolLimits(),
    "full": ToolLimits(max_result_chars=20_000, max_problems=8),
}


class EpisodeLimits(Frozen):
    """When an episode gives up; turns and attempts are in `PromptRules`, for the agent knows them."""

    max_malformed_calls: int = Field(3, ge=1)
    """Turns that start a tool call and do not finish it properly."""
    turn_s: float = Field(300.0, gt=0)
    """Wall-clock limit of one turn of the policy."""
    job_s: float = Field(3600.0, gt=0)
    """Wall-clock limit of the job, waiting for a worker included."""
    num_examples: int = Field(2, ge=0, le=64)
    """Dev items shown in the prompt."""
    tools: ToolLimits | None = None
    """None: those of the prompt style, short answers for compact and long ones for full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTask:
    """Everything that defines an episode except who plays it."""

    family: Family
    task_id: str
    task_seed: int
    """Chooses the dev examples; equal within a group."""
    policy_seed: int
    """Drives the policy's randomness."""
    style: PromptStyle = "compact"
    rules: PromptRules = field(default_factory=PromptRules)
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    folder: Path | None = None
    """Where the workspace is made and left behind; None: a temporary folder, removed at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEvent:
    """Something worth telling while an episode runs."""

    kind: str
    """`begun`, `replayed`, `turn`, `dispatched` or `finished`."""
    task_id: str
    detail: str = ""
    """One line for a person."""


EventSink = Callable[[EpisodeEvent], None]


@dataclass(slots=True, kw_only=True)
class _Talk:
    """What the turns of an episode leave behind."""

    turns: list[TurnRecord] = field(default_factory=list)
    ending: OutcomeCode = "max_turns"
    detail: str = ""
    trajectory: Trajectory | None = None


async def run_episode(
    task: EpisodeTask,
    policy: Policy,
    runner: JobRunner,
    *,
    turn_log: TurnLog | None = None,
    events: EventSink | None = None,
    clock: Clock | None = None,
) -> EpisodeResult:
    """Play one episode to its reward.

    Given the task's two seeds, a deterministic policy and a deterministic runner, the result is the
    same each time except for its seconds. With a `turn_log` every turn is recorded, and those
    recorded by an earlier try that was cut off are not sampled again.
    """
    watch = clock or SystemClock()
    tell = _teller(task, events)
    started_s = watch.monotonic()
    examples = episode_examples(task.family, task.task_seed, task.limits.num_examples)
    prompt = render_prompt(
        task.family, examples, template_gaps(), style=task.style, rules=task.rules
    )
    tell("begun", task.family.name)
    talk = _Talk()
    tools: AgentTools | None = None
    outcome: Outcome | None = None
    recorded = await turn_log.recorded() if turn_log is not None else ()
    if recorded:
        tell("replayed", f"{len(recorded)} turns of an earlier try")
    try:
        with _folder(task) as folder:
            async with stage("workspace", task.limits.turn_s):
                files = workspace_files(task.family, examples, task.rules)
                workspace = Workspace.create(folder, files, task.rules.workspace)
            tools = _tools(task, workspace, runner)
            async with stage("policy", task.limits.turn_s):
                session = policy.begin(prompt, task.policy_seed)
            flow = TurnFlow(session, turn_log, recorded)
            await _converse(task, session, flow, tools, talk, tell)
            if tools.accepted is not None:
                tell("dispatched", tools.accepted.bundle.job_hash)
                outcome = await _train(task, tools.accepted, runner)
                talk.ending, talk.detail = _job_ending(outcome)
    except StageFailedError as error:
        talk.ending, talk.detail = _dead_stage(error)
    result = _result(task, prompt, talk, tools, outcome, watch.monotonic() - started_s)
    tell("finished", f"{result.outcome_code} reward {result.reward:.3f}")
    return result


async def _converse(
    task: EpisodeTask,
    session: PolicySession,
    flow: TurnFlow,
    tools: AgentTools,
    talk: _Talk,
    tell: Callable[[str, str], None],
) -> None:
    """Let the agent work until its job is accepted or the talk ends for another reason."""
    try:
        talk.ending = await _turns(task, flow, tools, talk, tell)
    except ContextFullError as error:
        talk.ending, talk.detail = "context_full", str(error)
    finally:
        talk.trajectory = session.trajectory()
        session.close()


async def _turns(
    task: EpisodeTask,
    flow: TurnFlow,
    tools: AgentTools,
    talk: _Talk,
    tell: Callable[[str, str], None],
) -> OutcomeCode:
    """The turns; returns why they ended."""
    num_malformed = 0
    for _ in range(task.rules.max_turns):
        turn = await flow.next(task.limits.turn_s)
        parsed = _parse(turn)
        if isinstance(parsed, FinalAnswer):
            talk.turns.append(_record(turn))
            return "no_call"
        if isinstance(parsed, MalformedCall):
            num_malformed += 1
            name, answer = None, f"error: {parsed.reason}"
        else:
            name, answer = parsed.name, await tools.call(parsed.name, parsed.arguments)
        talk.turns.append(_record(turn, name, answer))
        tell("turn", name or "malformed call")
        if tools.accepted is not None:
            return "job_lost"  # until the job's own outcome is known
        if tools.attempts_left == 0:
            return "attempts_used_up"
        if num_malformed >= task.limits.max_malformed_calls:
            return "malformed_calls"
        await flow.observe(answer, task.limits.turn_s)
    return "max_turns"


def _parse(turn: AgentTurn) -> ToolCall | FinalAnswer | MalformedCall:
    if turn.truncated:
        return MalformedCall(
            reason="the turn was cut because it is too long; write less in one turn"
        )
    return parse_agent_turn(turn.text)


def _record(turn: AgentTurn, name: str | None = None, answer: str | None = None) -> TurnRecord:
    return TurnRecord(
        role="assistant",
        text=storable(turn.text),
        tool=None if name is None else storable(name[:80]),
        result=answer,
        tokens=len(turn.ids),
        truncated=turn.truncated,
    )


async def _train(task: EpisodeTask, accepted: Accepted, runner: JobRunner) -> Outcome:
    async with stage("runner", task.limits.job_s):
        return await runner.run(accepted.bundle, task.family.name)


def _job_ending(outcome: Outcome) -> tuple[OutcomeCode, str]:
    code: OutcomeCode
    match outcome.status:
        case "succeeded":
            code = "job_succeeded"
        case "failed":
            code = "job_failed"
        case "timed_out":
            code = "job_timed_out"
        case _:
            code = "job_lost"
    return code, outcome.reason


def _dead_stage(error: StageFailedError) -> tuple[OutcomeCode, str]:
    if error.name == "workspace":
        return "workspace_failed", error.detail
    if error.name == "policy":
        return ("policy_timed_out" if error.how == "timed_out" else "policy_failed"), error.detail
    return ("runner_timed_out" if error.how == "timed_out" else "runner_failed"), error.detail


def _tools(task: EpisodeTask, workspace: Workspace, runner: JobRunner) -> AgentTools:
    return AgentTools(
        workspace,
        task.family.name,
        runner,
        max_attempts=task.rules.weights.max_attempts,
        bounds=task.rules.bounds,
        limits=task.limits.tools or _TOOL_LIMITS[task.style],
    )


@contextmanager
def _folder(task: EpisodeTask) -> Iterator[Path]:
    """A path at which nothing exists yet."""
    if task.folder is not None:
        yield task.folder
        return
    with tempfile.TemporaryDirectory(prefix="nestling-episode-") as parent:
        yield Path(parent) / "workspace"


def _result(
    task: EpisodeTask,
    prompt: AgentPrompt,
    talk: _Talk,
    tools: AgentTools | None,
    outcome: Outcome | None,
    seconds: float,
) -> EpisodeResult:
    attempts = tuple(tools.attempts) if tools is not None else ()
    accepted = tools.accepted if tools is not None else None
    manifests = [attempt.manifest for attempt in attempts if attempt.manifest is not None]
    terms = compute_terms(
        outcome,
        valid_attempt=accepted.attempt.number if accepted is not None else None,
        submitted=any(attempt.readable for attempt in attempts),
        budget_share=_budget_share(task, accepted, outcome),
        weights=task.rules.weights,
    )
    trajectory = talk.trajectory
    return EpisodeResult(
        family=task.family.name,
        task_id=task.task_id,
        task_seed=task.task_seed,
        policy_seed=task.policy_seed,
        reward_kind=task.rules.reward_kind,
        reward=terms[task.rules.reward_kind].total,
        terms=terms,
        outcome_code=talk.ending,
        detail=storable(talk.detail),
        attempts=attempts,
        valid_attempt=accepted.attempt.number if accepted is not None else None,
        manifest=manifests[-1] if manifests else None,
        outcome=outcome,
        turns=(
            TurnRecord(role="system", text=prompt.system),
            TurnRecord(role="user", text=prompt.user),
            *talk.turns,
        ),
        num_turns=len(talk.turns),
        sampled_tokens=sum(turn.tokens for turn in talk.turns),
        total_tokens=len(trajectory.ids) if trajectory is not None else 0,
        trajectory=trajectory,
        seconds=max(0.0, seconds),
    )


def _budget_share(task: EpisodeTask, accepted: Accepted | None, outcome: Outcome | None) -> float:
    """Rollouts really played as a share of the largest allowed number."""
    if accepted is None or outcome is None or accepted.attempt.manifest is None:
        return 1.0
    played = outcome.train_steps * accepted.attempt.manifest.batch_size
    return min(1.0, played / task.rules.bounds.max_rollouts)


def _teller(task: EpisodeTask, events: EventSink | None) -> Callable[[str, str], None]:
    def tell(kind: str, detail: str) -> None:
        if events is not None:
            events(EpisodeEvent(kind=kind, task_id=task.task_id, detail=detail))

    return tell
