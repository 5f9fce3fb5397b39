"""One run from its recipe to its last step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nestling import __version__
from nestling.agent.episode import run_episode
from nestling.agent.episode_result import EpisodeResult
from nestling.agent.job_runner import JobRunner
from nestling.agent.policy import Policy
from nestling.config import RunConfig, RunpodFleet, recipe_toml
from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError
from nestling.core.machine import commit, machine_line
from nestling.core.rundir import RunDir, write_atomic
from nestling.families.splits import HIDDEN, EvalSecret, commitment
from nestling.fleet.runner import FleetRunner
from nestling.outer.config import TinkerConfig
from nestling.outer.heldout import Arm, HeldOutMeasure
from nestling.outer.learner import Handle
from nestling.outer.loop import OnStep, train
from nestling.outer.plan import EpisodePlan
from nestling.outer.play import OnEpisode
from nestling.outer.player import AgentPlayer
from nestling.outer.run_log import Progress
from nestling.outer.store_log import StoreLog
from nestling.outer.sweep_report import Sweep
from nestling.store import GroupCommit
from nestling.store.run_store import RunStore
from nestling.wiring.agents import (
    Agent,
    agent_folder,
    episode_task,
    learner_findings,
    open_agent,
    reference_policy,
)
from nestling.wiring.checks import check_names
from nestling.wiring.fleets import open_fleet, open_pod_provider
from nestling.wiring.state import SECRET_FILE, make_state_folder

if TYPE_CHECKING:
    from nestling.fleet.providers.runpod import RunpodProvider
    from nestling.outer.learners.embedded import EmbeddedLearner
    from nestling.outer.learners.tinker import TinkerLearner
    from nestling.outer.step_report import StepReport

__all__ = [
    "RunHooks",
    "open_pods",
    "play_cookbook",
    "play_run",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHooks:
    """What a run tells while it goes on."""

    on_step: OnStep | None = None
    on_episode: OnEpisode | None = None
    on_sweep: Callable[[int, Sweep], None] | None = None


async def play_run(config: RunConfig, folder: Path, hooks: RunHooks | None = None) -> Progress:
    """Train the agent to the last step of the recipe; continues a run that was interrupted.

    Raises:
        ConfigError: another recipe was started in this folder, or the jail is missing.
        FleetError, LearnerError, StoreError: resumable by calling again.
    """
    told = hooks or RunHooks()
    check_names(config)
    run = _open_run(config, folder)
    clock = SystemClock()
    async with _writing(run) as writer:
        with run.lock():
            await writer.run(lambda: _note_facts(config, writer.store))
            async with open_fleet(config, run, writer) as fleet:
                agent = await open_agent(config, run, writer)
                try:
                    return await _train(config, fleet, agent, writer, told, clock)
                finally:
                    agent.learner.close()


async def play_cookbook(config: RunConfig, folder: Path) -> None:
    """Our episodes and machine room under tinker-cookbook's own training loop.

    Raises:
        ConfigError: the recipe's learner is no Tinker service, or the extra is not installed.
        FleetError, LearnerError, StoreError: resumable by calling again.
    """
    if not isinstance(config.learner, TinkerConfig):
        raise ConfigError(
            f"learner.kind = {config.learner.kind!r}; expected tinker, all that the cookbook can train; "
            "set it, or use `nestling run`"
        )
    try:
        from nestling.outer.bridge.cookbook import EpisodeDataset, train_with_cookbook
    except ImportError as error:
        raise ConfigError(
            f"tinker-cookbook cannot be imported ({error}); expected the extra `cookbook`; install it "
            'in an environment of its own: pip install "nestling[cookbook]"'
        ) from error
    from nestling.agent.chat_template import ChatTemplate
    from nestling.outer.bridge.episodes import plays_of
    from nestling.outer.learners.tinker_open import refuse_problems

    check_names(config)
    run = _open_run(config, folder)
    tokenizer_folder = agent_folder(config.agent.model)
    chat = ChatTemplate.load(tokenizer_folder, config.agent.template_options)
    refuse_problems(await learner_findings(config))
    async with _writing(run) as writer:
        with run.lock():
            await writer.run(lambda: _note_facts(config, writer.store))
            async with open_fleet(config, run, writer) as fleet:

                async def play(plan: EpisodePlan, policy: Policy) -> EpisodeResult:
                    runner = fleet.for_episode(plan.episode_id, plan.group_id)
                    return await run_episode(episode_task(config, plan), policy, runner)

                dataset = EpisodeDataset(
                    config.outer,
                    config.families.training,
                    plays_of(play, chat, config.outer),
                    stop_ids=[chat.tokenizer.turn_end_id],
                )
                await train_with_cookbook(
                    config.outer,
                    config.learner,
                    dataset,
                    tokenizer_folder=tokenizer_folder,
                    log_path=run.root / "cookbook",
                )


@asynccontextmanager
async def open_pods(config: RunConfig, folder: Path) -> AsyncIterator[RunpodProvider]:
    """The pods of a run as their one controller, without playing it; what runs is left running.

    Raises:
        ConfigError: as `play_run`, or the recipe names no pods.
    """
    check_names(config)
    if not isinstance(config.fleet, RunpodFleet):
        raise ConfigError(
            f"fleet.kind = {config.fleet.kind!r} rents nothing; expected 'runpod'; see recipes/runpod.toml"
        )
    run = _open_run(config, folder)
    async with _writing(run) as writer:
        with run.lock():
            provider = await open_pod_provider(config, run, writer)
            try:
                yield provider
            finally:
                await provider.detach()


async def _train(
    config: RunConfig,
    fleet: FleetRunner,
    agent: Agent,
    writer: GroupCommit,
    told: RunHooks,
    clock: SystemClock,
) -> Progress:
    learner = agent.learner

    def make_runner(plan: EpisodePlan) -> JobRunner:
        return fleet.for_episode(plan.episode_id, plan.group_id)

    def on_step(report: StepReport) -> None:
        if agent.costs is not None:
            found, step = agent.costs(), report.step
            writer.submit(lambda: writer.store.metrics.record(step, found))
        if told.on_step is not None:
            told.on_step(report)

    log = StoreLog(writer, policy=config.agent.model)
    player = AgentPlayer(
        learner=learner,
        tokenizer=agent.tokenizer,
        chat=agent.chat,
        make_runner=make_runner,
        make_task=lambda plan: episode_task(config, plan),
        config=config.outer,
        turn_log=log.turn_log,
        clock=clock,
    )
    families = config.families.held_out
    if config.references.training_families:
        families = (*config.families.training, *families)
    measure = HeldOutMeasure(
        player,
        config=config.outer,
        families=families,
        log=log,
        open_untrained=lambda: _untrained(learner),
        references=[_reference_arm(player, name, config) for name in config.references.arms],
        on_sweep=told.on_sweep,
    )
    return await train(
        config.outer,
        learner=learner,
        player=player,
        log=log,
        families=config.families.training,
        clock=clock,
        on_step=on_step,
        on_episode=told.on_episode,
        measure=measure,
        open_policy=learner.open_policy,
    )


async def _untrained(learner: EmbeddedLearner | TinkerLearner) -> Handle:
    return await learner.open_policy("step-000000")


def _reference_arm(player: AgentPlayer, name: str, config: RunConfig) -> Arm:
    policy = reference_policy(name, config)

    async def play(plan: EpisodePlan) -> EpisodeResult:
        return await player.play_policy(plan, policy)

    return Arm(name=name, play=play)


def _open_run(config: RunConfig, folder: Path) -> RunDir:
    """Make the run folder, or check that it holds this very recipe."""
    text = recipe_toml(config)
    path = folder / "config.toml"
    if path.exists() and path.read_text("utf-8") != text:
        raise ConfigError(
            f"{folder} holds a run of another recipe; expected the same settings to continue it; "
            "choose another --out, or repeat the settings of its config.toml"
        )
    run = RunDir.create(folder)
    write_atomic(path, text.encode())
    return run


def _note_facts(config: RunConfig, store: RunStore) -> None:
    """What the report says about the run, and the seal of the hidden sets; the first start wins."""
    secret = EvalSecret.load_or_create(make_state_folder() / SECRET_FILE)
    facts = {
        "run.name": config.name,
        "run.version": __version__,
        "run.commit": commit() or "",
        "run.machine": machine_line(),
        "run.jail": "none" if config.unsafe_no_jail else "bubblewrap",
        **{f"commitment.{split}": commitment(secret, split) for split in HIDDEN},
    }
    for key, value in facts.items():
        if value and store.meta(key) is None:
            store.set_meta(key, value)


@asynccontextmanager
async def _writing(run: RunDir) -> AsyncIterator[GroupCommit]:
    store = RunStore(run.root / "run.db")
    with closing(store):
        writer = GroupCommit(store)
        try:
            yield writer
        finally:
            await asyncio.to_thread(writer.close)
