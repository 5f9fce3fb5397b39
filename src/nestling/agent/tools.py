"""The agent's six tools: checked arguments in, short text out.

A bad call never raises: its result starts with `error:` and says how to do it right. Only a dead or
slow machine room raises (`StageFailedError`), because no text to the agent can mend that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from nestling.agent.attempt import AttemptRecord, summarise_manifest
from nestling.agent.job_runner import JobRunner
from nestling.agent.stage import StageFailedError, stage
from nestling.agent.tool_schemas import argument_problem
from nestling.agent.workspace import Workspace, WorkspaceError
from nestling.core.errors import JobRejectedError, Problem
from nestling.core.frozen import Frozen
from nestling.jobs.bounds import SMALL, Bounds
from nestling.jobs.bundle import Bundle, freeze
from nestling.jobs.probe_report import clip_line

__all__ = ["ACCEPTED", "Accepted", "AgentTools", "ToolLimits", "capped", "rejection_text"]

ACCEPTED = "accepted"
"""The whole answer to a submission that passed."""


class ToolLimits(Frozen):
    """How much a tool may say and how long the machine room may take."""

    max_result_chars: int = Field(1200, ge=100)
    max_problems: int = Field(4, ge=1)
    """Problems of one submission that are told."""
    check_s: float = Field(300.0, gt=0)
    """Wall-clock limit of one probe, waiting included."""
    baselines_s: float = Field(600.0, gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The submission that passed the probe."""

    bundle: Bundle
    attempt: AttemptRecord


class AgentTools:
    """The tools of one episode and what they remember: attempts and the accepted job."""

    def __init__(
        self,
        workspace: Workspace,
        family: str,
        runner: JobRunner,
        *,
        max_attempts: int = 3,
        bounds: Bounds = SMALL,
        limits: ToolLimits | None = None,
    ) -> None:
        self.workspace = workspace
        self.attempts: list[AttemptRecord] = []
        self.accepted: Accepted | None = None
        self._family = family
        self._runner = runner
        self._max_attempts = max_attempts
        self._bounds = bounds
        self._limits = limits or ToolLimits()

    @property
    def attempts_left(self) -> int:
        """Submissions the agent may still make."""
        return self._max_attempts - len(self.attempts)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What a tool answers, capped in length."""
        problem = argument_problem(name, arguments)
        if problem is not None:
            return self._capped(f"error: {problem}")
        try:
            answer = await self._dispatch(name, arguments)
        except WorkspaceError as error:
            answer = f"error: {error}"
        except OSError as error:
            raise StageFailedError("workspace", "failed", str(error)) from error
        return self._capped(answer)

    async def _dispatch(self, name: str, arguments: Mapping[str, Any]) -> str:
        match name:
            case "get_baseline_scores":
                return await self._baselines()
            case "list_files":
                return "\n".join(self.workspace.paths())
            case "read_file":
                return self.workspace.read(arguments["path"])
            case "write_file":
                self.workspace.write(arguments["path"], arguments["content"])
                return "ok"
            case "edit_file":
                self.workspace.edit(arguments["path"], arguments["old"], arguments["new"])
                return "ok"
            case _:
                return await self._submit()

    async def _baselines(self) -> str:
        async with stage("runner", self._limits.baselines_s):
            scores = await self._runner.baselines(self._family)
        told = [f"{name} {score:.2f}" for name, score in sorted(scores.items())]
        # Named once more than the others: without this a small agent never learnt to compare.
        best = min(scores, key=lambda name: (-scores[name], name))
        return "\n".join([f"best: {best}", *told])

    async def _submit(self) -> str:
        if self.accepted is not None:
            return "error: a job was already accepted; the episode is over"
        if self.attempts_left <= 0:
            return "error: no submissions left; the episode is over"
        number = len(self.attempts) + 1
        text = self._manifest_text()
        try:
            bundle = freeze(self.workspace.root)
        except JobRejectedError as error:
            return self._reject(
                AttemptRecord.rejected(number, error.problems, text, self._bounds), error.problems
            )
        async with stage("runner", self._limits.check_s):
            report = await self._runner.check(bundle, self._family)
        if not report.ok:
            record = AttemptRecord.rejected(
                number, report.problems, text, self._bounds, job_hash=bundle.job_hash
            )
            return self._reject(record, report.problems)
        record = AttemptRecord(
            number=number,
            ok=True,
            readable=True,
            manifest=summarise_manifest(text, self._bounds),
            job_hash=bundle.job_hash,
            predicted_cpu_s=report.predicted_cpu_s,
        )
        self.attempts.append(record)
        self.accepted = Accepted(bundle=bundle, attempt=record)
        return ACCEPTED

    def _reject(self, record: AttemptRecord, problems: Sequence[Problem]) -> str:
        self.attempts.append(record)
        return rejection_text(problems, self.attempts_left, self._limits)

    def _manifest_text(self) -> str | None:
        try:
            return self.workspace.read("job.toml")
        except WorkspaceError:
            return None

    def _capped(self, text: str) -> str:
        return capped(text, self._limits.max_result_chars)


def rejection_text(problems: Sequence[Problem], attempts_left: int, limits: ToolLimits) -> str:
    """What the agent reads after a failed submission: attempts left, then one line per problem."""
    shown = problems[: limits.max_problems]
    lines = [f"rejected; submissions left: {attempts_left}"]
    lines += [f"error {clip_line(problem.line())}" for problem in shown]
    if len(problems) > len(shown):
        lines.append(f"and {len(problems) - len(shown)} more problems")
    return "\n".join(lines)


def capped(text: str, max_chars: int) -> str:
    """At most `max_chars` characters, with a note of how many were left out."""
    if len(text) <= max_chars:
        return text
    note = f"\n... ({len(text)} characters, the rest is left out)"
    return text[: max_chars - len(note)] + note
