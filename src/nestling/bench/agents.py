"""Agents as a person names them: scripted, the shipped model, a model folder, a run, an endpoint."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nestling.agent.episode import EventSink, run_episode
from nestling.agent.episode_result import EpisodeResult
from nestling.agent.job_runner import JobRunner
from nestling.agent.policies.endpoint_config import EndpointConfig, read_endpoint
from nestling.config import AgentConfig, RunConfig
from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError
from nestling.core.rundir import RunDir
from nestling.outer.plan import EpisodePlan
from nestling.outer.play import PlayPlan
from nestling.outer.player import AgentPlayer
from nestling.wiring.agents import (
    ADAPTER_FILE,
    WEIGHTS_FILE,
    agent_folder,
    episode_task,
    open_learner,
    reference_policy,
)

__all__ = ["REFERENCES", "AgentSpec", "model_folder", "open_agent", "read_agent"]

REFERENCES: Final = ("noop", "random", "template", "oracle")
_EMBEDDED: Final = "embedded"
_ENDPOINT: Final = "endpoint:"
_MERGED: Final = "merged"
"""Whole weights inside an exported adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """One agent, found on disk."""

    label: str
    """As it was named."""
    arm: str
    """Equal only for equal weights, so that recorded episodes are never those of another model."""
    folder: Path | None
    """Model folder; None for a scripted agent and for an endpoint."""
    endpoint: EndpointConfig | None = None


def read_agent(text: str) -> AgentSpec:
    """Find the agent that is called so.

    `noop`, `random`, `template`, `oracle`, `embedded`, `embedded:WHAT` (a shipped agent, a model
    folder, an exported agent, or a run folder, which stands for its newest agent), or
    `endpoint:URL#MODEL` (see `read_endpoint`), which nothing is asked of yet.

    Raises:
        ConfigError: no such agent.
    """
    kind, colon, where = text.partition(":")
    if text in REFERENCES:
        return AgentSpec(label=text, arm=text, folder=None)
    if text.startswith(_ENDPOINT):
        endpoint = read_endpoint(text.removeprefix(_ENDPOINT))
        name = re.sub(r"[^A-Za-z0-9._-]", "-", endpoint.model)
        return AgentSpec(
            label=text, arm=f"{name}-{endpoint.identity[:8]}", folder=None, endpoint=endpoint
        )
    if kind != _EMBEDDED or (colon and not where):
        raise ConfigError(
            f"unknown agent {text!r}; expected {', '.join(REFERENCES)}, embedded, "
            f"embedded:FOLDER with a model or a run, or endpoint:URL#MODEL; check the spelling"
        )
    folder = model_folder(where) if where else agent_folder(AgentConfig().model)
    weights = folder / WEIGHTS_FILE
    file = weights if weights.is_file() else folder / ADAPTER_FILE
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    name = re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name)
    return AgentSpec(label=text, arm=f"{name}-{digest[:8]}", folder=folder)


@asynccontextmanager
async def open_agent(
    spec: AgentSpec,
    config: RunConfig,
    scratch: Path,
    make_runner: Callable[[EpisodePlan], JobRunner],
    *,
    events: EventSink | None = None,
) -> AsyncIterator[PlayPlan]:
    """The agent, ready to play planned episodes; its model is freed at the end."""
    clock = SystemClock()
    if spec.endpoint is not None:
        from nestling.agent.policies.endpoint import EndpointPolicy

        agent = config.agent.model_copy(update={"style": spec.endpoint.style})
        asked = config.model_copy(update={"agent": agent})
        async with EndpointPolicy.opened(spec.endpoint, clock=clock) as remote:

            async def ask(plan: EpisodePlan) -> EpisodeResult:
                task = episode_task(asked, plan)
                runner = make_runner(plan)
                return await run_episode(task, remote, runner, events=events, clock=clock)

            yield ask
        return
    if spec.folder is None:
        policy = reference_policy(spec.label, config)

        async def play(plan: EpisodePlan) -> EpisodeResult:
            task = episode_task(config, plan)
            return await run_episode(task, policy, make_runner(plan), events=events, clock=clock)

        yield play
        return
    model = config.agent.model_copy(update={"model": str(spec.folder)})
    used = config.model_copy(update={"agent": model})
    learner = open_learner(used, RunDir(scratch / spec.arm))
    try:
        handle = await learner.publish()
        player = AgentPlayer(
            learner=learner,
            tokenizer=learner.tokenizer,
            make_runner=make_runner,
            make_task=lambda plan: episode_task(used, plan),
            config=used.outer,
            events=events,
            clock=clock,
        )

        async def play_model(plan: EpisodePlan) -> EpisodeResult:
            return await player.play(plan, handle)

        yield play_model
    finally:
        learner.close()


def model_folder(where: str) -> Path:
    """The folder that holds the weights of a shipped agent, a model, an exported agent or a run.

    Raises:
        ConfigError: there are none.
    """
    folder = agent_folder(where)
    if (folder / "run.db").is_file():
        saved = sorted(folder.glob(f"learner/step-*/{WEIGHTS_FILE}"))
        if not saved:
            raise ConfigError(
                f"the run {folder} has saved no agent with all its weights; expected "
                f"{folder}/learner/step-*/{WEIGHTS_FILE}; let the run make a step, export an adapter "
                f"with `nestling export`, or name a model folder"
            )
        return saved[-1].parent
    if (folder / ADAPTER_FILE).is_file():
        return folder / _MERGED if (folder / _MERGED / WEIGHTS_FILE).is_file() else folder
    if not (folder / WEIGHTS_FILE).is_file():
        raise ConfigError(
            f"{folder} has no {WEIGHTS_FILE}; expected a model folder or a run folder; check the path"
        )
    return folder
