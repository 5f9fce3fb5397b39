"""A verifiers v1 taskset served in this process: real Task, Toolset, State and scoring code.

Tools are called directly instead of through a server per rollout, and each rollout's Trace gets
its message nodes without the token bookkeeping. Rewards and metrics are those of the
framework's own path; `tests/jobs/test_verifiers_host.py` compares them. Private names of
verifiers are used (`_call_state`, `_tool_manager`), hence the exact version.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import importlib.metadata
import inspect
import json
import math
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from nestling.core.errors import ConfigError, JailError
from nestling.jobs.rollout_env import (
    CallRequest,
    FinalRequest,
    RolloutStart,
    Row,
    ScoreRecord,
)

__all__ = ["VERIFIERS_VERSION", "VerifiersHost", "load_taskset_from"]

VERIFIERS_VERSION: Final = "0.4.0"

if (_found := importlib.metadata.version("verifiers")) != VERIFIERS_VERSION:
    raise ConfigError(
        f"verifiers {_found} is installed; expected {VERIFIERS_VERSION}, whose internals this "
        f"module uses; fix: pip install verifiers=={VERIFIERS_VERSION}"
    )

import pydantic_core  # noqa: E402 (after the version check)
import verifiers.v1 as vf  # noqa: E402
from mcp.server.mcpserver import MCPServer  # noqa: E402
from pydantic import ValidationError  # noqa: E402
from verifiers.v1.graph import MessageNode  # noqa: E402
from verifiers.v1.mcp.server import ServerBase, _call_state  # noqa: E402
from verifiers.v1.session import call_hook, hook_boundary  # noqa: E402
from verifiers.v1.state import state_cls  # noqa: E402
from verifiers.v1.trace import (  # noqa: E402
    AgentInfo,
    ModelCall,
    TraceTask,
    VersionInfo,
)
from verifiers.v1.types import (  # noqa: E402
    AssistantMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    Usage,
    UserMessage,
)
from verifiers.v1.utils.decorators import discover_decorated  # noqa: E402
from verifiers.v1.utils.generic import concrete_type  # noqa: E402

T = TypeVar("T")
VfTaskset = Any
VfTask = Any
Foreign = Any
"""A value of the author's making: nothing is known of its type (verifiers ships no types)."""

MAX_LIVE_ROLLOUTS: Final = 65536
MAX_TOOL_CHARS: Final = 8192
"""A longer tool answer is replaced by an error text."""
MAX_ERROR_CHARS: Final = 400
MAX_SCORES: Final = 64
MAX_NAME_CHARS: Final = 128
MAX_ABS_SCORE: Final = 1e9

_AGENT = AgentInfo(config=vf.AgentConfig())
_VERSION = VersionInfo(version=VERIFIERS_VERSION)
_STOPS: Final = {
    "done": "agent_completed",
    "max_turns": "max_turns",
    "max_tokens": "max_total_tokens",
}
_OPEN_CALL: Final = "<tool_call>"


class VerifiersHost:
    """A `RolloutEnv` over one taskset, in this process; call it from one thread, outside a loop.

    Raises:
        JailError: the taskset, its tools or its rows are not usable; the reason code says which.
            Faults of a single tool call or reward are texts and records, never exceptions.
    """

    def __init__(self, taskset: VfTaskset) -> None:
        self._taskset = taskset
        self._source: Iterator[Any] = iter(taskset)
        self._exhausted = False
        self._rows: list[_LoadedRow] = []
        self._kind: _TaskKind | None = None
        self._shared: list[Any] = []
        self._live: dict[int, _Rollout] = {}
        self._next_id = 0
        self._loop = asyncio.new_event_loop()

    def rows(self, limit: int) -> list[Row]:
        """The first `limit` rows; fewer when the data set is shorter. The iterator is lazy."""
        self._load_rows(limit)
        return [row.row for row in self._rows[:limit]]

    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools in OpenAI function-schema form; empty when the task has none."""
        self._load_rows(1)
        return copy.deepcopy(self._task_kind().schemas)

    def reset(self, rows: Sequence[int]) -> list[RolloutStart]:
        """Start rollouts, each with its own State and toolsets."""
        if len(self._live) + len(rows) > MAX_LIVE_ROLLOUTS:
            raise JailError("env.too_many_rollouts", f"at most {MAX_LIVE_ROLLOUTS} at a time")
        starts = []
        for index in rows:
            self._load_rows(index + 1)
            if not 0 <= index < len(self._rows):
                raise JailError("env.no_such_row", f"row {index}; there are {len(self._rows)}")
            loaded = self._rows[index]
            rollout = self._start(loaded)
            rollout_id = self._next_id
            self._next_id += 1
            self._live[rollout_id] = rollout
            starts.append(
                RolloutStart(
                    rollout_id=rollout_id,
                    system_prompt=loaded.row.system_prompt,
                    prompt=loaded.row.prompt,
                )
            )
        return starts

    def step(self, calls: Sequence[CallRequest]) -> list[str | None]:
        """Answer tool calls in order; a raising tool or bad arguments give an `error:` text."""
        answers: list[str | None] = []
        for call in calls:
            rollout = self._find(call.rollout_id)
            answer = self._answer(rollout, call)
            rollout.add_call(call, answer)
            answers.append(None if self._stopped(rollout) else answer)
        return answers

    def score(self, finals: Sequence[FinalRequest]) -> list[ScoreRecord]:
        """Finish, score and forget rollouts, one after the other."""
        return self._run(self._score_all(finals))

    def close(self) -> None:
        """Drop every rollout and the event loop."""
        self._live.clear()
        if not self._loop.is_closed():
            self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(coroutine)

    def _task_kind(self) -> _TaskKind:
        if self._kind is None:
            raise JailError("env.no_rows", "load() yields no task; expected at least one row")
        return self._kind

    def _find(self, rollout_id: int) -> _Rollout:
        rollout = self._live.get(rollout_id)
        if rollout is None:
            raise JailError("env.no_such_rollout", f"rollout {rollout_id} is not running")
        return rollout

    def _load_rows(self, count: int) -> None:
        while len(self._rows) < count and not self._exhausted:
            try:
                task = next(self._source)
            except StopIteration:
                self._exhausted = True
                return
            except Exception as e:
                raise JailError("env.rows", f"row {len(self._rows)}: {describe(e)}") from e
            loaded = _load_row(len(self._rows), task)
            if self._kind is None:
                self._share_toolsets()
                self._kind = self._run(_describe_kind(task, self._shared))
            elif type(task) is not self._kind.task_type:
                raise JailError(
                    "env.rows",
                    f"row {loaded.row.index} is a {type(task).__name__}, the rows before are "
                    f"{self._kind.task_type.__name__}; expected one task class",
                )
            self._rows.append(loaded)

    def _share_toolsets(self) -> None:
        try:
            self._shared = list(type(self._taskset).toolsets(self._taskset.config))
            for toolset in self._shared:
                self._run(toolset.setup())
        except Exception as e:
            raise JailError("env.setup", f"shared toolsets: {describe(e)}") from e

    def _start(self, loaded: _LoadedRow) -> _Rollout:
        kind = self._task_kind()
        task = copy.copy(loaded.task)  # attributes a hook sets stay in this rollout
        try:
            state = kind.state_type()
            trace = _StrictTrace(
                task=loaded.trace_task(), state=state, agent=_AGENT, verifiers=_VERSION
            )
            toolsets = [*self._shared, *task.toolsets(task.config)]
            rollout = _Rollout(task=task, trace=trace, toolsets=toolsets)
            for message in loaded.messages:
                rollout.add_node(message)
            if kind.has_setup:
                self._run(self._set_up(rollout))
        except Exception as e:
            raise JailError("env.setup", f"row {loaded.row.index}: {describe(e)}") from e
        if [type(toolset) for toolset in toolsets] != kind.toolset_types:
            raise JailError(
                "env.tools", f"row {loaded.row.index} has other toolsets than the first row"
            )
        return rollout

    async def _set_up(self, rollout: _Rollout) -> None:
        token = _call_state.set(rollout.trace.state)
        try:
            await rollout.task.setup(rollout.trace, None)
            for toolset in rollout.toolsets[len(self._shared) :]:
                await toolset.setup()
                await toolset.setup_task(rollout.task.data)
        finally:
            _call_state.reset(token)

    def _answer(self, rollout: _Rollout, call: CallRequest) -> str:
        if call.malformed is not None:
            return _clip(f"error: {call.malformed}")
        tool = self._task_kind().tools.get(call.name)
        if tool is None:
            names = ", ".join(self._task_kind().tools) or "none"
            return _clip(f"error: no tool named {call.name}; tools: {names}")
        token = _call_state.set(rollout.trace.state)
        try:
            arguments = tool.metadata.validate_arguments(call.arguments)
            function = getattr(rollout.toolsets[tool.toolset], tool.attribute)
            result = function(**arguments)
            if inspect.isawaitable(result):
                result = self._run(_wait(result))
            return _clip_answer(_tool_text(result))
        except ValidationError as e:
            return _clip(f"error: bad arguments for {call.name}: {_validation_text(e)}")
        except Exception as e:  # noqa: BLE001 (the author's code; the model is told)
            return _clip(f"error: {describe(e)}")
        finally:
            _call_state.reset(token)

    def _stopped(self, rollout: _Rollout) -> bool:
        stops = rollout.stops(self._task_kind())
        return bool(stops) and self._run(_check_stops(rollout, stops))

    async def _score_all(self, finals: Sequence[FinalRequest]) -> list[ScoreRecord]:
        records = []
        for final in finals:
            rollout = self._find(final.rollout_id)
            del self._live[final.rollout_id]
            rollout.add_final(final)
            records.append(await _score(rollout, self._task_kind()))
        return records


def load_taskset_from(package_dir: Path, env_args: dict[str, Any] | None = None) -> VfTaskset:
    """The taskset of the job in `package_dir`, whose package is the folder `environment`.

    Runs the package's code. `env_args` are the taskset's own config fields.

    Raises:
        JailError: `env.import` (the package does not import or exports no single Taskset),
            `env.config` (a value the taskset's config refuses).
    """
    sys.path.insert(0, str(package_dir))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module("environment")
    except Exception as e:
        raise JailError("env.import", f"import environment: {describe(e)}{_where(e)}") from e
    exported = getattr(module, "__all__", None)
    if not isinstance(exported, list | tuple):
        raise JailError(
            "env.import",
            "environment/__init__.py has no __all__; expected __all__ = [<your Taskset>]",
        )
    found = [
        value
        for name in exported
        if isinstance(value := getattr(module, str(name), None), type)
        and issubclass(value, vf.Taskset)
        and value is not vf.Taskset
    ]
    if len(found) != 1:
        raise JailError(
            "env.import",
            f"__all__ = {list(exported)} names {len(found)} Taskset classes; expected exactly one",
        )
    taskset_type = found[0]
    config_type = concrete_type(taskset_type, vf.TasksetConfig) or vf.TasksetConfig
    try:
        config = config_type.model_validate({**(env_args or {}), "id": "environment"})
    except ValidationError as e:
        raise JailError("env.config", f"[env]: {_validation_text(e)}") from e
    try:
        return taskset_type(config)
    except Exception as e:
        raise JailError("env.import", f"{taskset_type.__name__}(config): {describe(e)}") from e


def describe(error: BaseException) -> str:
    """An error in one line of at most 400 characters."""
    return _clip(f"{type(error).__name__}: {error}".replace("\n", " "))


class _StrictTrace(vf.Trace):  # type: ignore[misc]
    """A Trace that takes only honest numbers: a bool, a text or infinity is no reward."""

    def record_reward(self, name: str, value: Foreign, weight: float = 1.0) -> None:
        if self.rewards.get(name) is not None:
            raise ValueError(f"two rewards are named {name!r}")
        if isinstance(value, bool):
            raise TypeError(f"reward {name} returned a bool; expected a float: float(...)")
        super().record_reward(name, _finite(f"reward {name}", value), weight)
        _finite(f"weighted reward {name}", self.rewards[name].value)

    def record_metric(self, name: str, value: Foreign) -> None:
        super().record_metric(name, _finite(f"metric {name}", value))


@dataclass(slots=True, kw_only=True)
class _LoadedRow:
    row: Row
    task: VfTask
    messages: list[Any]
    key: str | None = None
    hash: str | None = None

    def trace_task(self) -> Foreign:
        if self.hash is None:
            self.hash = self.task.hash
            self.key = self.hash if type(self.task).key is vf.Task.key else self.task.key
        return TraceTask(
            type=type(self.task).__name__, data=self.task.data, key=self.key, hash=self.hash
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tool:
    toolset: int
    """Position in the rollout's list of toolsets, shared ones first."""
    attribute: str
    metadata: Foreign
    """The tool's own argument model, with its coercions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskKind:
    """What is the same for every row of a task class."""

    task_type: type
    state_type: Any
    toolset_types: list[type]
    tools: dict[str, _Tool]
    schemas: list[dict[str, Any]]
    has_setup: bool
    has_finalize: bool
    has_stops: bool
    score_problem: str | None
    """Why no rollout can be scored, when a reward would be skipped silently."""


@dataclass(slots=True, kw_only=True)
class _Rollout:
    task: VfTask
    trace: Any
    toolsets: list[Any]
    num_calls: int = 0
    unread: Foreign = None
    """The answer to the last call: part of the trace once the model has spoken again."""
    stop_hooks: list[Callable[..., Any]] | None = None

    def add_node(self, message: Foreign, *, sampled: bool = False) -> None:
        nodes = self.trace.nodes
        parent = len(nodes) - 1 if nodes else None
        nodes.append(MessageNode(parent=parent, message=message, sampled=sampled))

    def add_turn(
        self, message: Foreign, finish_reason: str, request: CallRequest | FinalRequest
    ) -> None:
        if self.unread is not None:
            self.add_node(self.unread)
            self.unread = None
        self.add_node(message, sampled=True)
        usage = Usage(
            prompt_tokens=request.prompt_tokens, completion_tokens=request.completion_tokens
        )
        self.trace.calls.append(
            ModelCall(
                node=len(self.trace.nodes) - 1,
                model="policy",
                finish_reason=finish_reason,
                usage=usage,
            )
        )

    def add_call(self, call: CallRequest, answer: str) -> None:
        call_id = f"call_{self.num_calls}"
        self.num_calls += 1
        if call.malformed is not None:
            self.add_turn(AssistantMessage(content=call.text), "stop", call)
        else:
            before = call.text.partition(_OPEN_CALL)[0].strip()
            arguments = json.dumps(call.arguments)
            tool_call = ToolCall(id=call_id, name=call.name, arguments=arguments)
            message = AssistantMessage(content=before or None, tool_calls=[tool_call])
            self.add_turn(message, "tool_calls", call)
        self.unread = ToolMessage(tool_call_id=call_id, name=call.name or None, content=answer)

    def add_final(self, final: FinalRequest) -> None:
        stopped = self.trace.stop_condition is not None
        if final.text or (final.stop == "done" and not stopped):
            finish = "length" if final.stop == "max_tokens" else "stop"
            self.add_turn(AssistantMessage(content=final.text), finish, final)
        self.trace.stop(_STOPS[final.stop])

    def stops(self, kind: _TaskKind) -> list[Callable[..., Any]]:
        if not kind.has_stops:
            return []
        if self.stop_hooks is None:
            self.stop_hooks = self.task.hooks("stop")
        return self.stop_hooks


def _load_row(index: int, task: VfTask) -> _LoadedRow:
    if not isinstance(task, vf.Task):
        raise JailError("env.rows", f"row {index} is a {type(task).__name__}; expected a vf.Task")
    try:
        data = task.data
        data_json = data.model_dump_json()
        type(data).model_validate_json(data_json)
        messages = _prompt_messages(data)
    except Exception as e:
        raise JailError("env.rows", f"row {index} does not survive JSON: {describe(e)}") from e
    if not messages or not isinstance(messages[-1], UserMessage) or len(messages) > 2:
        raise JailError(
            "env.rows",
            f"row {index} has {len(messages)} messages; expected a prompt text, with or without "
            "a system_prompt",
        )
    texts = [message.content for message in messages]
    if not all(isinstance(text, str) for text in texts):
        raise JailError("env.rows", f"row {index} has a prompt that is not plain text")
    if len(messages) == 2 and not isinstance(messages[0], SystemMessage):
        raise JailError("env.rows", f"row {index} starts with {messages[0].role}; expected system")
    row = Row(
        index=index,
        system_prompt=texts[0] if len(texts) == 2 else "",
        prompt=texts[-1],
        data_json=data_json,
    )
    return _LoadedRow(row=row, task=task, messages=messages)


def _prompt_messages(data: Foreign) -> list[Any]:
    system = [SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, UserMessage(content=data.prompt)]
    return [*system, *(data.prompt or [])]


async def _describe_kind(task: VfTask, shared: list[Any]) -> _TaskKind:
    task_type = type(task)
    try:
        toolsets = [*shared, *task.toolsets(task.config)]
        tools, schemas = await _describe_tools(toolsets)
        stops = task.hooks("stop")
        bad_stops = [
            s.__name__ for s in stops if hook_boundary(s, allow_trace=True) is not vf.Trace
        ]
        score_problem = _score_problem(task)
    except JailError:
        raise
    except Exception as e:
        raise JailError("env.tools", f"{task_type.__name__}: {describe(e)}") from e
    if bad_stops or discover_decorated(task, "intercept"):
        raise JailError(
            "env.hooks",
            f"{task_type.__name__} uses @vf.intercept or a stop on Request or Response "
            f"({', '.join(bad_stops)}); expected stops on Trace only",
        )
    state_type = state_cls(task_type)
    for toolset in toolsets:
        if state_cls(type(toolset)) is not state_type:
            raise JailError(
                "env.state",
                f"{type(toolset).__name__} uses {state_cls(type(toolset)).__name__} and "
                f"{task_type.__name__} uses {state_type.__name__}; expected the same State class, "
                "otherwise writes of tools are lost",
            )
    return _TaskKind(
        task_type=task_type,
        state_type=state_type,
        toolset_types=[type(toolset) for toolset in toolsets],
        tools=tools,
        schemas=schemas,
        has_setup=task_type.setup is not vf.Task.setup
        or any(
            type(toolset).setup is not ServerBase.setup
            or type(toolset).setup_task is not ServerBase.setup_task
            for toolset in toolsets
        ),
        has_finalize=task_type.finalize is not vf.Task.finalize,
        has_stops=bool(stops),
        score_problem=score_problem,
    )


async def _describe_tools(toolsets: list[Any]) -> tuple[dict[str, _Tool], list[dict[str, Any]]]:
    tools: dict[str, _Tool] = {}
    schemas = []
    for position, toolset in enumerate(toolsets):
        prefix = toolset.server_name
        server = MCPServer(prefix or type(toolset).__name__)
        toolset.register(server)
        by_name = {tool.name: tool for tool in server._tool_manager.list_tools()}
        for function in discover_decorated(toolset, "tool"):
            bare = getattr(function, "tool_name", None) or function.__name__
            tool = by_name[bare]
            name = f"{prefix}_{bare}" if prefix else bare
            if name in tools:
                raise JailError("env.tools", f"two tools are named {name}")
            if tool.context_kwarg is not None or tool.resolved_params:
                raise JailError("env.tools", f"tool {name} asks for a server context")
            tools[name] = _Tool(
                toolset=position, attribute=function.__name__, metadata=tool.fn_metadata
            )
            schema = {"name": name, "description": tool.description, "parameters": tool.parameters}
            schemas.append({"type": "function", "function": schema})
    return tools, schemas


def _score_problem(task: VfTask) -> str | None:
    if task.config.judges:
        return "judges call a model over the network; expected only @vf.reward methods"
    rewards = task.hooks("reward")
    if not rewards:
        return f"{type(task).__name__} has no @vf.reward method; expected at least one"
    for function in [*rewards, *task.hooks("metric")]:
        parameter = inspect.signature(function).parameters.get("runtime")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            return f"{function.__name__} needs a runtime; expected only task and trace"
    return None


async def _check_stops(rollout: _Rollout, stops: list[Callable[..., Any]]) -> bool:
    for stop in stops:
        try:
            fired = await call_hook(stop, {vf.Trace: rollout.trace})
        except Exception as e:
            raise JailError("env.stop", f"{stop.__name__}: {describe(e)}") from e
        if not isinstance(fired, bool):
            raise JailError(
                "env.stop", f"{stop.__name__} returned a {type(fired).__name__}; expected a bool"
            )
        if fired:
            rollout.trace.stop(stop.__name__)
            return True
    return False


async def _score(rollout: _Rollout, kind: _TaskKind) -> ScoreRecord:
    trace, task = rollout.trace, rollout.task
    if kind.score_problem is not None:
        return ScoreRecord(reward=0.0, error=kind.score_problem)
    try:
        if kind.has_finalize:
            await task.finalize(trace, None)
        await task.score(trace)
        kind.state_type.model_validate_json(trace.state.model_dump_json())
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing or not trace.rewards:
            return ScoreRecord(reward=0.0, error=f"no value for reward {', '.join(missing)}")
        metrics = {name: _finite(name, value) for name, value in trace.metrics.items()}
        rewards = {name: _finite(name, value.value) for name, value in trace.rewards.items()}
        total = _finite("reward", math.fsum(rewards.values()))
        _check_names([*rewards, *metrics])
    except Exception as e:  # noqa: BLE001 (the author's code; the record says what it did)
        return ScoreRecord(reward=0.0, error=describe(e))
    return ScoreRecord(reward=total, rewards=rewards, metrics=metrics)


async def _wait(awaitable: Foreign) -> Foreign:
    return await awaitable


def _tool_text(result: Foreign) -> str:
    if isinstance(result, str):
        return result
    if result is None:
        return ""
    return pydantic_core.to_json(result, fallback=str, indent=2).decode()


def _check_names(names: list[Foreign]) -> None:
    for name in names:
        if not isinstance(name, str) or len(name) > MAX_NAME_CHARS:
            raise ValueError(f"a reward or metric has no name of 1 to {MAX_NAME_CHARS} characters")
    if len(names) > MAX_SCORES:
        raise ValueError(f"{len(names)} rewards and metrics; expected at most {MAX_SCORES}")


def _finite(name: str, value: Foreign) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a float")
    number = float(value)
    if not (math.isfinite(number) and abs(number) <= MAX_ABS_SCORE):
        raise ValueError(
            f"{name} is {number}; expected a finite float of at most {MAX_ABS_SCORE:g}"
        )
    return number


def _validation_text(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(str(part) for part in item['loc']) or 'value'}: {item['msg']}"
        for item in error.errors(include_url=False, include_input=False, include_context=False)
    )


def _where(error: BaseException) -> str:
    """File and line of the author's code nearest to the fault, when there is one."""
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if "/environment/" in name or "/tools/" in name:
            tail = "/".join(Path(name).parts[-2:])
            place = f" at {tail}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


def _clip(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 1] + "…"


def _clip_answer(text: str) -> str:
    if len(text) > MAX_TOOL_CHARS:
        return f"error: the tool answered {len(text)} characters; at most {MAX_TOOL_CHARS}"
    return text
