"""The agent of a recipe: its folder, its learner, its episodes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nestling.agent.episode import EpisodeLimits, EpisodeTask
from nestling.agent.policies.scripted import scripted
from nestling.agent.policy import Policy
from nestling.agent.prompt import PromptRules
from nestling.config import RunConfig
from nestling.core.errors import ConfigError, StoreError
from nestling.core.rundir import RunDir
from nestling.families.open_models import fetched_folder, open_models, read_record
from nestling.families.registry import get
from nestling.inner.models_config import bounds_of
from nestling.outer.config import EmbeddedConfig, TinkerConfig
from nestling.outer.plan import EpisodePlan
from nestling.store import GroupCommit
from nestling.wiring.state import make_state_folder

if TYPE_CHECKING:
    from nestling.agent.chat_template import ChatTemplate
    from nestling.engine.model import Model
    from nestling.engine.tokenizer import Tokenizer
    from nestling.outer.learners.embedded import EmbeddedLearner
    from nestling.outer.learners.tinker import TinkerLearner
    from nestling.outer.learners.tinker_faults import Pause
    from nestling.outer.learners.tinker_open import Finding

__all__ = [
    "ADAPTER_FILE",
    "AGENTS_FOLDER",
    "WEIGHTS_FILE",
    "Agent",
    "agent_folder",
    "episode_task",
    "learner_findings",
    "load_agent",
    "open_agent",
    "open_learner",
    "reference_policy",
]


AGENTS_FOLDER: Final = Path(__file__).parents[1] / "agent" / "weights"
WEIGHTS_FILE: Final = "model.safetensors"
ADAPTER_FILE: Final = "adapter_model.safetensors"


def open_learner(config: RunConfig, run: RunDir) -> EmbeddedLearner:
    """The agent as a learner in this process; its states are kept in the run folder."""
    from nestling.outer.learners.embedded import EmbeddedLearner

    model = load_agent(agent_folder(config.agent.model), config.agent.device)
    settings = config.learner if isinstance(config.learner, EmbeddedConfig) else EmbeddedConfig()
    sessions = max(settings.num_sessions, config.outer.max_parallel_episodes)
    return EmbeddedLearner(
        model,
        run.root / "learner",
        max_total_tokens=config.outer.max_total_tokens,
        config=settings.model_copy(update={"num_sessions": sessions}),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """What is trained, and how it reads and writes."""

    learner: EmbeddedLearner | TinkerLearner
    tokenizer: Tokenizer
    chat: ChatTemplate | None = None
    costs: Callable[[], dict[str, float]] | None = None
    """What the service billed since the last call, by metric."""


async def open_agent(config: RunConfig, run: RunDir, writer: GroupCommit) -> Agent:
    """The learner and what it reads with, by the recipe."""
    if not isinstance(config.learner, TinkerConfig):
        embedded = open_learner(config, run)
        return Agent(learner=embedded, tokenizer=embedded.tokenizer)
    from nestling.agent.chat_template import ChatTemplate
    from nestling.outer.learners.tinker_open import open_tinker, refuse_problems

    chat = ChatTemplate.load(agent_folder(config.agent.model), config.agent.template_options)
    refuse_problems(await learner_findings(config))
    model = config.learner.base_model

    def note(pause: Pause) -> None:
        facts = {"kind": pause.kind, "detail": pause.detail}
        with suppress(StoreError):  # the run is ending
            writer.submit(lambda: writer.store.events.append("learner.paused", model, facts))

    learner = open_tinker(
        config.learner,
        run.root / "learner",
        stop_ids=[chat.tokenizer.turn_end_id],
        on_pause=note,
    )
    return Agent(learner=learner, tokenizer=chat.tokenizer, chat=chat, costs=learner.costs)


async def learner_findings(config: RunConfig) -> list[Finding]:
    """What a hosted learner needs, looked at without spending anything; nothing for our own."""
    if not isinstance(config.learner, TinkerConfig):
        return []
    from nestling.outer.learners.tinker_open import preflight

    return await preflight(
        config.learner,
        max_total_tokens=config.outer.max_total_tokens,
        temperature=config.outer.temperature,
    )


def agent_folder(name: str) -> Path:
    """Folder of a shipped agent, the folder that was named, or that of an open model that was fetched."""
    shipped = AGENTS_FOLDER / name
    if shipped.is_dir():
        return shipped
    if Path(name).is_dir():
        return Path(name)
    if name in open_models():
        fetched = fetched_folder(make_state_folder(), name)
        if read_record(fetched) is not None:
            return fetched
        raise ConfigError(f"agent {name!r} was not fetched yet; run: nestling models fetch {name}")
    known = sorted(path.name for path in AGENTS_FOLDER.glob("*") if path.is_dir())
    raise ConfigError(
        f"no agent {name!r}; expected one of {', '.join([*known, *open_models()])}, or a model folder; "
        "check agent.model"
    )


def load_agent(folder: Path, device: str) -> Model:
    """The model in a folder: whole weights, or an adapter merged into the model that it names.

    Raises:
        ConfigError: the base of an adapter is not here.
        ModelError: the folder is damaged, or the adapter is of another model.
    """
    from nestling.engine.checkpoint import load_model
    from nestling.engine.lora import adapter_base, load_adapter

    if (folder / WEIGHTS_FILE).is_file() or not (folder / ADAPTER_FILE).is_file():
        return load_model(folder, device)
    named = adapter_base(folder)
    model = load_model(folder / named if (folder / named).is_dir() else agent_folder(named), device)
    model.weights = load_adapter(folder, model.config, device).merged(model.weights)
    return model


def episode_task(config: RunConfig, plan: EpisodePlan) -> EpisodeTask:
    """A planned episode with the rules of the run."""
    return EpisodeTask(
        family=get(plan.family),
        task_id=plan.episode_id,
        task_seed=plan.task_seed,
        policy_seed=plan.policy_seed,
        style=config.agent.style,
        rules=PromptRules(
            bounds=bounds_of(config.models, config.inner.trainer),
            weights=config.reward.weights,
            reward_kind=config.reward.kind,
            max_turns=config.agent.max_turns,
        ),
        limits=_episode_limits(config),
    )


def _episode_limits(config: RunConfig) -> EpisodeLimits:
    if not isinstance(config.learner, TinkerConfig):
        return EpisodeLimits()
    # The learner has its own limit and says what it waited for: it must be the first to give up.
    learner = config.learner
    return EpisodeLimits(turn_s=learner.sample_timeout_s * learner.sample_attempts + 60.0)


def reference_policy(name: str, config: RunConfig) -> Policy:
    """A scripted policy by name, which keeps to the bounds of the recipe."""
    return scripted(name, bounds_of(config.models, config.inner.trainer))
