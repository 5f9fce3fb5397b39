# mypy: disable-error-code="misc"
"""Rows, state and tool plumbing that every family's verifiers toolset shares."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["Data", "RolloutState", "RolloutTools"]


class Data(vf.TaskData):
    """One training row; `prompt` and `system_prompt` come from `vf.TaskData`."""

    answer: str
    """The right value after `ANSWER: `."""
    num_calls: int = 0
    """Tool calls of the shortest correct solution."""
    world: dict[str, Any] = Field(default_factory=dict)
    """What the tools look up or start from."""


class RolloutState(vf.State):
    """What every rollout counts; readable in a rubric as `trace.state`."""

    started: bool = False
    calls: int = 0
    """Tool calls made, good or bad."""
    errors: int = 0
    """Tool calls that were answered with a text that starts with `error:`."""


class RolloutTools:
    """Runs a family's pure tool function on the state of the current rollout.

    The state is filled from the row at the first call: it may live in another process than the one
    that set the tools up.
    """

    TOOL_PREFIX: ClassVar[str | None] = None
    rules: ClassVar[ModuleType]
    """The family's module with `start(world)` and `call(world, state, name, arguments)`."""
    world: dict[str, Any]
    """The row's world; set by `setup_task`."""
    state: Any
    """Comes from `vf.Toolset`; the keys of `start(world)` are fields of it."""

    async def setup_task(self, task: Data) -> None:
        """Remember the row's world."""
        self.world = task.world

    def use(self, tool: str, **arguments: str | int) -> str:
        """Answer one call and count it."""
        state = self.state
        fresh = self.rules.start(self.world)
        if not state.started:
            for field, value in fresh.items():
                setattr(state, field, value)
            state.started = True
        fields = {field: getattr(state, field) for field in fresh}
        answer: str = self.rules.call(self.world, fields, tool, arguments)
        state.calls += 1
        state.errors += answer.startswith("error:")
        return answer
