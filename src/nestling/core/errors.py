"""Every error a caller may want to catch.

NestlingError
├── ConfigError        a recipe, a flag or an argument is wrong: exit code 2
├── JobRejectedError   a job breaks the rules; carries the problems to fix
├── JobFailedError     a job died while training or scoring
├── JailError          agent code broke the pipe protocol, its limits, or the jail cannot start
├── ModelError         a model folder is missing, damaged or not supported
├── FleetError         a worker, the queue or a provider failed
├── StoreError         the run store is damaged, busy or full
└── LearnerError       a learner could not sample or update

A failure of the agent or of its job is recorded as an outcome; only our own bugs propagate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

__all__ = [
    "ConfigError",
    "FleetError",
    "JailError",
    "JobFailedError",
    "JobRejectedError",
    "LearnerError",
    "ModelError",
    "NestlingError",
    "Problem",
    "StoreError",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a job, written for whoever has to fix it."""

    stage: str
    """Probe stage that found it: files, schema, budget, static, load, rows, tools, rubric, rollout."""
    code: str
    """Stable identifier, for example `schema.unknown_key`."""
    wrong: str
    """What was wrong, with the value."""
    expected: str
    """What was expected."""
    fix: str
    """What to do about it."""

    def line(self) -> str:
        """The problem as one line for a terminal or an agent."""
        return f"[{self.stage}] {self.wrong}; expected {self.expected}; fix: {self.fix}"


class NestlingError(Exception):
    """Root of all errors raised on purpose."""


class ConfigError(NestlingError):
    """A recipe, a flag or an argument is wrong."""


class JobRejectedError(NestlingError):
    """A job breaks the rules; `problems` says how to fix it."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(problem.line() for problem in problems))
        self.problems = problems

    def __reduce__(self) -> tuple[type[Self], tuple[list[Problem]]]:
        return type(self), (self.problems,)


class JobFailedError(NestlingError):
    """A job died while training or scoring; `reason` is a stable code."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        return type(self), (self.reason, self.detail)


class JailError(NestlingError):
    """Agent code broke the pipe protocol or its limits, or the jail cannot start."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        return type(self), (self.reason, self.detail)


class ModelError(NestlingError):
    """A model folder is missing, damaged or not supported."""


class FleetError(NestlingError):
    """A worker, the queue or a provider failed."""


class StoreError(NestlingError):
    """The run store is damaged, busy or full."""


class LearnerError(NestlingError):
    """A learner could not sample or update."""
