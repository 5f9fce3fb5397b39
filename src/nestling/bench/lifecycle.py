# mypy: disable-error-code="misc"
"""verifiers' own full lifecycle of a rollout, in this process: what the env worker's host is measured against.

Real `Agent.run`: runtime, setup, session, stop conditions, one prepared and committed turn per model turn,
finalize, scoring, timing, trace. Two of its public seams keep everything in one process: a harness that
loops here, and an interception that hands it its session. The model is a script. Tools are called
directly, as a tool server does it: the framework's servers cost seconds of processor time a rollout.
"""

from __future__ import annotations

import asyncio
import copy
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import verifiers.v1 as vf
from verifiers.v1 import graph
from verifiers.v1.interception import Interception
from verifiers.v1.mcp.server import _call_state
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.trace import ModelCall
from verifiers.v1.types import (
    AssistantMessage,
    Response,
    SystemMessage,
    ToolCall,
    ToolMessage,
    Usage,
    UserMessage,
)

__all__ = ["LocalHarness", "ScriptedTurns", "play_lifecycle"]

Foreign = Any
"""A value of the framework, which ships no types."""

_LIVE: Final[dict[str, tuple[Foreign, ScriptedTurns, list[Foreign]]]] = {}
"""Secret of a running rollout to its session, its script and its toolsets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedTurns:
    """What a model says in one rollout."""

    calls: Sequence[tuple[str, dict[str, Any]]]
    """Tool and arguments, one call a turn."""
    final: str | None
    """The last turn; None when a limit or a stop condition ends the rollout before."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Reported for every turn."""


class LocalHarness(vf.Harness[vf.HarnessConfig]):
    """A chat loop in this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Foreign,
        trace: Foreign,
        runtime: Foreign,  # noqa: ARG002 (the framework's signature)
        endpoint: str,  # noqa: ARG002
        secret: str,
        mcp_urls: Foreign,  # noqa: ARG002
        data: Foreign,
        **_: Foreign,
    ) -> Foreign:
        """See `vf.Harness.launch`."""
        session, script, toolsets = _LIVE[secret]
        token = _call_state.set(trace.state)
        try:
            for toolset in toolsets:
                await toolset.setup()
                await toolset.setup_task(data)
        finally:
            _call_state.reset(token)
        messages: list[Any] = []
        if data.system_prompt:
            messages.append(SystemMessage(content=data.system_prompt))
        messages.append(UserMessage(content=data.prompt))
        while not await session.refused():
            turn = graph.prepare_turn(trace, list(messages), [])
            message, finish = _turn_of(script, len(trace.calls))
            usage = Usage(
                prompt_tokens=script.prompt_tokens, completion_tokens=script.completion_tokens
            )
            response = Response(
                id="",
                created=0,
                model=ctx.model,
                message=message,
                finish_reason=finish,
                usage=usage,
            )
            node = turn.commit(response)
            trace.calls.append(
                ModelCall(node=node, model=ctx.model, finish_reason=finish, usage=usage)
            )
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                answer = await _answer(trace, toolsets, call)
                messages.append(ToolMessage(tool_call_id=call.id, name=call.name, content=answer))
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def play_lifecycle(
    tasks: Sequence[Any], scripts: Sequence[ScriptedTurns], *, max_turns: int = 16
) -> list[Any]:
    """The finished trace of each task under its script, in order; all run at once."""
    config = vf.AgentConfig(
        model="policy",
        harness={"id": "null"},
        runtime={"type": "subprocess"},
        max_turns=max_turns,
    )
    hub = _LocalInterception()
    async with hub:
        agent = vf.Agent(config, interception=hub)
        agent.harness = LocalHarness(agent.harness.config)
        runs = []
        for task, script in zip(tasks, scripts, strict=True):
            bare = copy.copy(task)
            bare.__class__ = _without_servers(type(task))
            bare.data = task.data.model_copy()  # so that each rollout is known by its own data
            hub.waiting[id(bare.data)] = (script, task.toolsets(task.config))
            runs.append(bare)
        async with asyncio.TaskGroup() as group:
            started = [group.create_task(agent.run(bare)) for bare in runs]
        return [task.result() for task in started]


class _LocalInterception(Interception):
    """Hands each rollout's session to the harness under a secret, with no server between them."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[int, tuple[ScriptedTurns, list[Any]]] = {}

    async def start(self) -> None:
        """Nothing to start."""

    @asynccontextmanager
    async def acquire(self, session: Foreign) -> AsyncIterator[tuple[str, str, str]]:
        """See `Interception.acquire`."""
        secret = secrets.token_urlsafe(8)
        script, toolsets = self.waiting.pop(id(session.trace.task.data))
        _LIVE[secret] = (session, script, toolsets)
        try:
            yield "local://", secret, secret
        finally:
            del _LIVE[secret]
            session.release()


_BARE: Final[dict[type, type]] = {}


def _without_servers(task_type: type) -> type:
    """The same task class, for whose toolsets no server is started."""
    if task_type not in _BARE:
        body = {"toolsets": classmethod(_no_toolsets), "__module__": task_type.__module__}
        _BARE[task_type] = type(task_type.__name__, (task_type,), body)
    return _BARE[task_type]


def _no_toolsets(_task_type: type, _config: Foreign) -> list[Foreign]:
    return []


def _turn_of(script: ScriptedTurns, number: int) -> tuple[Any, str]:
    if number == len(script.calls):
        return AssistantMessage(content=script.final), "stop"
    name, arguments = script.calls[number]
    call = ToolCall(id=f"call_{number}", name=name, arguments=json.dumps(arguments))
    return AssistantMessage(content=None, tool_calls=[call]), "tool_calls"


async def _answer(trace: Foreign, toolsets: list[Any], call: Foreign) -> str:
    token = _call_state.set(trace.state)
    try:
        function = next(
            getattr(toolset, call.name) for toolset in toolsets if hasattr(toolset, call.name)
        )
        found = function(**json.loads(call.arguments))
        return str(await found if asyncio.iscoroutine(found) else found)
    finally:
        _call_state.reset(token)
