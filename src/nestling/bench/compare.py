"""Agents against each other: the same tasks, the same seeds, real jobs, one resumable run folder."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from nestling.agent.episode_result import EpisodeResult
from nestling.bench.agents import AgentSpec, open_agent
from nestling.config import FamiliesConfig, LocalFleet, RunConfig, load_recipe, recipe_toml
from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError
from nestling.core.machine import commit
from nestling.core.rundir import RunDir, write_atomic
from nestling.core.seeds import derive_seed
from nestling.families.splits import EvalSecret, commitment
from nestling.outer.config import HeldOutConfig, OuterConfig
from nestling.outer.episode_facts import Summary
from nestling.outer.heldout import Arm, sweep
from nestling.outer.plan import EpisodePlan
from nestling.outer.play import PlayPlan
from nestling.outer.stats import Estimate, power
from nestling.outer.store_log import StoreLog
from nestling.outer.sweep_report import ALL_FAMILIES, Sweep
from nestling.store import GroupCommit
from nestling.store.run_store import RunStore
from nestling.wiring.fleets import open_fleet
from nestling.wiring.sealed import Opened, Opening, SealedSet
from nestling.wiring.state import SECRET_FILE, make_state_folder

__all__ = [
    "EFFECT",
    "NOOP",
    "Compared",
    "OnPlayed",
    "arm_figures",
    "compare_agents",
    "default_folder",
]

NOOP: Final = "noop"
"""Always an arm: gains are counted from it."""
EFFECT: Final = 0.05
"""Difference in mean reward that is worth finding."""

OnPlayed = Callable[[AgentSpec, EpisodePlan, EpisodeResult], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What was played."""

    sweep: Sweep
    opened: Opened | None
    """What goes with every figure of hidden set C; None when set B paid."""


async def compare_agents(
    config: RunConfig,
    agents: Sequence[AgentSpec],
    folder: Path,
    told: OnPlayed,
    *,
    again: bool = False,
) -> Compared:
    """Play every agent on `config.families.held_out`, `config.outer.held_out.episodes` times each.

    Episodes that the folder already holds are not played again; more agents, families or episodes
    may be added by calling again, unless set C pays. `noop` must be among the agents.

    Args:
        config: its `inner.split` says which hidden set pays; c is opened, and that is recorded.
        agents: in any order.
        folder: of the run.
        told: called for every episode that is played.
        again: open set C although it was opened for another sweep.

    Raises:
        ConfigError: the folder belongs to other settings, the jail is missing, or set C was opened before.
        FleetError, LearnerError, StoreError: may be continued by calling again.
    """
    open_set: Callable[[], Opened] | None = None
    if config.inner.split == "c":
        opening, record = _opening(config, agents, folder), SealedSet(make_state_folder())
        record.check(opening, again=again)
        open_set = partial(record.open, opening, again=again)
    run = _open_folder(config, folder)
    with closing(RunStore(run.database)) as store, run.lock():
        writer = GroupCommit(store)
        try:
            return await _play(config, agents, run, writer, told, open_set)
        finally:
            await asyncio.to_thread(writer.close)


def arm_figures(found: Sweep, arm: str, family: str = ALL_FAMILIES) -> dict[str, Any]:
    """One row of the comparison; None stands for what could not be measured."""
    result = found.result(arm, family)
    summary, gain = result.summary, found.comparison(arm, NOOP, family)
    uplift = summary.uplift if summary else None
    post = summary.post if summary else None
    difference = gain.difference if gain else None
    found_power = power(difference, EFFECT) if difference else None
    return {
        "n": summary.n if summary else 0,
        "dead": result.dead,
        "reward_mean": summary.reward.mean if summary else None,
        "reward_ci": _interval(summary.reward if summary else None),
        "terms": _terms(summary),
        "validity": summary.validity if summary else None,
        "first_try_validity": summary.first_try_validity if summary else None,
        "job_success": summary.job_success if summary else None,
        "post_mean": post.mean if post else None,
        "post_ci": _interval(post),
        "post_n": post.n if post else 0,
        "uplift_mean": uplift.mean if uplift else None,
        "uplift_ci": _interval(uplift),
        "gain_over_noop": difference.mean if difference else None,
        "gain_ci": _interval(difference),
        "p_value": difference.p_value if difference else None,
        "power": found_power.model_dump() if found_power else None,
    }


def default_folder(config: RunConfig) -> Path:
    """A run folder that is the same for settings that may share their episodes."""
    name = "sealed" if config.inner.split == "c" else "eval"
    return Path("runs") / f"{name}-{_settings_digest(config)[:8]}"


async def _play(
    config: RunConfig,
    agents: Sequence[AgentSpec],
    run: RunDir,
    writer: GroupCommit,
    told: OnPlayed,
    open_set: Callable[[], Opened] | None,
) -> Compared:
    outer = config.outer
    log = StoreLog(writer, policy="compared")
    async with AsyncExitStack() as opened:
        fleet = await opened.enter_async_context(open_fleet(config, run, writer))
        arms = []
        for agent in agents:
            play = await opened.enter_async_context(
                open_agent(
                    agent,
                    config,
                    run.root / "agents",
                    lambda plan: fleet.for_episode(plan.episode_id, plan.group_id),
                )
            )
            arms.append(Arm(name=agent.arm, play=_telling(agent, play, told)))
        # Last, when nothing else can stop the first score.
        on_record = open_set() if open_set is not None else None
        found = await sweep(
            arms,
            config.families.held_out,
            config=outer.held_out,
            seed=derive_seed(outer.seed, "held-out"),
            log=log,
            against=[NOOP],
            max_parallel_episodes=outer.max_parallel_episodes,
            episode_timeout_s=outer.episode_timeout_s,
        )
        await log.sweep_done(0, found)
        return Compared(sweep=found, opened=on_record)


def _opening(config: RunConfig, agents: Sequence[AgentSpec], folder: Path) -> Opening:
    """What the record of set C says of this sweep."""
    secret = EvalSecret.load_or_create(make_state_folder() / SECRET_FILE)
    return Opening(
        at=datetime.fromtimestamp(SystemClock().now(), UTC).isoformat(timespec="seconds"),
        commitment=commitment(secret, "c"),
        agents=tuple(agent.label for agent in agents),
        arms=tuple(sorted(agent.arm for agent in agents)),
        families=tuple(sorted(config.families.held_out)),
        episodes=config.outer.held_out.episodes,
        seed=config.outer.seed,
        settings=_settings_digest(config),
        folder=str(folder),
        commit=commit(),
    )


def _telling(agent: AgentSpec, play: PlayPlan, told: OnPlayed) -> PlayPlan:
    async def played(plan: EpisodePlan) -> EpisodeResult:
        result = await play(plan)
        told(agent, plan, result)
        return result

    return played


def _open_folder(config: RunConfig, folder: Path) -> RunDir:
    """Make the folder, or check that what it holds may be counted together with this."""
    path = folder / "config.toml"
    if path.exists() and _comparable(load_recipe(path, sealed=True)) != _comparable(config):
        raise ConfigError(
            f"{folder} holds episodes of other settings; expected those of {path}, only agents, "
            f"families and numbers of episodes may differ; choose another --folder"
        )
    if not path.exists() and (folder / "run.db").exists():
        raise ConfigError(f"{folder} holds a run without config.toml; choose another --folder")
    run = RunDir.create(folder)
    write_atomic(path, recipe_toml(config).encode())
    return run


def _settings_digest(config: RunConfig) -> str:
    return hashlib.sha256(recipe_toml(_comparable(config)).encode()).hexdigest()


def _comparable(config: RunConfig) -> RunConfig:
    """Without what may differ between episodes that are compared."""
    kept = config.outer.held_out.model_copy(
        update={"episodes": HeldOutConfig.model_fields["episodes"].default}
    )
    parallel = OuterConfig.model_fields["max_parallel_episodes"].default
    outer = config.outer.model_copy(update={"held_out": kept, "max_parallel_episodes": parallel})
    return config.model_copy(
        update={"families": FamiliesConfig(), "outer": outer, "fleet": LocalFleet()}
    )


def _terms(summary: Summary | None) -> dict[str, float] | None:
    """Means of the three terms, before their weights."""
    if summary is None:
        return None
    return {
        "validation": summary.validation,
        "quality": summary.quality,
        "speed": summary.speed,
    }


def _interval(estimate: Estimate | None) -> list[float] | None:
    if estimate is None or estimate.lo is None or estimate.hi is None:
        return None
    return [estimate.lo, estimate.hi]
