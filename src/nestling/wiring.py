"""Config to objects: the only module that names backends. Heavy imports happen when they are needed.

Two halves: `make_handlers` builds the machine room inside a worker process; `play_run` builds the
controller of a run around the outer loop. Secrets travel by path, never on a command line.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nestling import __version__
from nestling.agent.episode import EpisodeLimits, EpisodeTask, run_episode
from nestling.agent.episode_result import EpisodeResult
from nestling.agent.job_runner import JobRunner
from nestling.agent.policies.scripted import scripted
from nestling.agent.policy import Policy
from nestling.agent.prompt import PromptRules
from nestling.config import LocalFleet, RayFleet, RunConfig, RunpodFleet, recipe_toml
from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError, StoreError
from nestling.core.machine import commit, machine_line
from nestling.core.rundir import ArtifactStore, RunDir, write_atomic
from nestling.core.seeds import derive_seed
from nestling.families.registry import get
from nestling.families.splits import HIDDEN, EvalSecret, commitment
from nestling.fleet.budget import GRACE_S, Budget, load_prices
from nestling.fleet.handlers import StageSeconds, job_handlers
from nestling.fleet.memory import memory_limits
from nestling.fleet.plan import PlannedWork, RunPlan
from nestling.fleet.pool import PoolLimits
from nestling.fleet.predict import Predictor, expected_job
from nestling.fleet.provider import Provider
from nestling.fleet.providers.local import LocalProvider, LocalWorkers, cores_here
from nestling.fleet.runner import FleetRunner, RunnerSettings
from nestling.fleet.slots import Slot, deal, find_gpus
from nestling.fleet.start import running_fleet
from nestling.fleet.worker import Handlers
from nestling.inner.baselines import Baselines, state_folder
from nestling.inner.models_config import bounds_of, offered_bases
from nestling.inner.run import InnerContext, run_job
from nestling.inner.scorer import Scorer
from nestling.inner.trainer import Trainer, TrainLimits
from nestling.jobs.budget import Caps
from nestling.jobs.bundle import Bundle
from nestling.jobs.jail import Jail, JailLimits, require_bubblewrap
from nestling.jobs.leaks import LeakIndex
from nestling.jobs.outcome import Outcome, StepRecord
from nestling.jobs.probe import ProbeOptions, ProbeReport, probe
from nestling.jobs.probe_env import JailedOpener
from nestling.outer.config import EmbeddedConfig, TinkerConfig
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
from nestling.store.account import Account
from nestling.store.run_store import RunStore

if TYPE_CHECKING:
    from nestling.agent.chat_template import ChatTemplate
    from nestling.engine.tokenizer import Tokenizer
    from nestling.fleet.providers.runpod import RunpodProvider
    from nestling.fleet.providers.runpod_account import PodAccount
    from nestling.outer.learners.embedded import EmbeddedLearner
    from nestling.outer.learners.tinker import TinkerLearner
    from nestling.outer.learners.tinker_faults import Pause
    from nestling.outer.learners.tinker_open import Finding
    from nestling.outer.step_report import StepReport

__all__ = [
    "Room",
    "RunHooks",
    "agent_folder",
    "episode_task",
    "learner_findings",
    "make_handlers",
    "open_account",
    "open_fleet",
    "open_learner",
    "open_pod_account",
    "open_pods",
    "open_room",
    "plan_run",
    "play_cookbook",
    "play_run",
    "refuse_distant_stacks",
    "running_stacks",
]

logger = logging.getLogger(__name__)

AGENTS_FOLDER: Final = Path(__file__).parent / "agent" / "weights"
_HANDLERS: Final = "nestling.wiring:make_handlers"
_ACCOUNT_FILE: Final = "account.db"
_LEAKS_FOLDER: Final = "leaks"
_SECRET_FILE: Final = "eval-secret"  # noqa: S105 (a name)


# --- inside a worker -------------------------------------------------------------------------


class Room:
    """The machine room of one worker: warm jail zygote, trainer, scorer, baselines, leak indexes."""

    def __init__(
        self, config: RunConfig, state: Path, work: Path, stacks: tuple[str, ...] = ()
    ) -> None:
        """`stacks`: sockets from `running_stacks`, when the recipe's trainer is stacked."""
        from nestling.jobs.env_zygote import Zygote

        self._config = config
        self._state = state
        self._secret_path = state / _SECRET_FILE
        jail = Jail(unsafe=config.unsafe_no_jail)
        self._zygote = None if config.unsafe_no_jail else Zygote(jail)
        self._bases = offered_bases(config.models, state)
        folders = {name: base.folder for name, base in self._bases.items()}
        self._scorer = self._make_scorer(folders, stacks)
        self.baselines_table = Baselines(self._scorer, folders, folder=state)
        self._opener = JailedOpener(jail=jail, starter=self._zygote)
        self._leaks: dict[str, LeakIndex | None] = {}
        price = load_prices()[config.fleet.machine]
        self.context = InnerContext(
            trainer=self._trainer(jail, stacks),
            scorer=self._scorer,
            baselines=self.baselines_table,
            bases=folders,
            bounds=bounds_of(config.models, config.inner.trainer),
            work_folder=work,
            keep_models=config.inner.keep_models,
            n=config.inner.eval_items,
            seed=config.inner.seed,
            usd_per_hour=price.usd_per_hour,
            limits=TrainLimits(wall_s=config.inner.train_wall_s),
        )

    def check(self, bundle: Bundle, family: str) -> ProbeReport:
        """Run the probe with this room's zygote and the family's leak index."""
        options = ProbeOptions(
            leaks=self._leak_index(family),
            caps=Caps(usd_per_cpu_hour=self.context.usd_per_hour),
            eval_items=self._config.inner.eval_items,
            params={name: base.params for name, base in self._bases.items()},
            bounds=self.context.bounds,
        )
        return probe(bundle, family, env_opener=self._opener, options=options)

    def run(self, bundle: Bundle, family: str, log: Callable[[StepRecord], None]) -> Outcome:
        """Train and score."""
        return run_job(bundle, family, self.context, log)

    def baselines(self, family: str) -> dict[str, float]:
        """Untrained score of every base on hidden set A."""
        n = self._config.inner.eval_items
        return {name: self.baselines_table.get(name, family, "a", n).mean for name in self._bases}

    def warm(self) -> None:
        """Start the scorer now, for a worker that is about to need it."""
        self._scorer.start()

    def close(self) -> None:
        """End the scorer and the zygote."""
        self._scorer.close()
        if self._zygote is not None:
            self._zygote.close()

    def _make_scorer(self, folders: Mapping[str, Path], stacks: tuple[str, ...]) -> Scorer:
        from nestling.inner.scorers.embedded import EmbeddedScorer
        from nestling.inner.scorers.openai import OpenAiScorer

        inner = self._config.inner
        if inner.scorer == "openai":
            return OpenAiScorer(
                inner.openai,
                secret_path=self._secret_path,
                bases=folders,
                score_wall_s=inner.score_wall_s,
            )
        return EmbeddedScorer(
            secret_path=self._secret_path,
            bases=folders,
            stacks=stacks,
            score_wall_s=inner.score_wall_s,
            device=self._config.models.device,
        )

    def _trainer(self, jail: Jail, stacks: tuple[str, ...]) -> Trainer:
        from nestling.inner.stack_client import Stacks
        from nestling.inner.trainers.embedded import EmbeddedTrainer
        from nestling.inner.trainers.stacked import StackedTrainer

        starter = self._zygote
        if self._config.inner.trainer == "prime_rl":
            from nestling.inner.job_env import JobEnvOpener
            from nestling.inner.trainers.prime_rl import PrimeRlTrainer

            clock = SystemClock()
            opener = JobEnvOpener(
                jail=jail, starter=starter, limits=JailLimits(), leaks=self._leak_index, clock=clock
            )
            hidden = (self._secret_path, self._state / _LEAKS_FOLDER)
            return PrimeRlTrainer(
                self._config.inner.prime_rl, open_env=opener, hidden=hidden, clock=clock
            )
        spot_seed = None if self._config.unsafe_no_jail else self._spot_seed()
        if self._config.inner.trainer == "stacked":
            return StackedTrainer(
                stacks=Stacks(sockets=stacks),
                jail=jail,
                starter=starter,
                leaks=self._leak_index,
                spot_seed=spot_seed,
            )
        return EmbeddedTrainer(
            jail=jail,
            starter=starter,
            leaks=self._leak_index,
            device=self._config.models.device,
            spot_seed=spot_seed,
        )

    def _spot_seed(self) -> int:
        """What spot checks look at: the same on every start, and unknown to a job."""
        return derive_seed(EvalSecret.load_or_create(self._secret_path).key, "spot checks")

    def _leak_index(self, family: str) -> LeakIndex | None:
        """The family's index, kept on disk: building one takes seconds."""
        items = self._config.inner.leak_items
        if items == 0:
            return None
        if family not in self._leaks:
            self._leaks[family] = load_leak_index(family, items, self._state)
        return self._leaks[family]


def load_leak_index(family: str, items: int, state: Path) -> LeakIndex:
    """The leak index of a family, built once per secret and kept with mode 0600."""
    secret = EvalSecret.load_or_create(state / _SECRET_FILE)
    path = state / _LEAKS_FOLDER / f"{family}-{items}-v2-{commitment(secret, 'a')[:16]}.json"
    if path.exists():
        return LeakIndex.loads(path.read_bytes())
    index = LeakIndex.for_family(family, secret, hidden=items)
    write_atomic(path, index.dumps())
    path.chmod(0o600)
    return index


@asynccontextmanager
async def open_room(config: RunConfig, work: Path) -> AsyncIterator[Room]:
    """A machine room in this process, for a single job."""
    _refuse_unjailed(config)
    if not config.unsafe_no_jail:
        require_bubblewrap()
    with running_stacks(config, work / "logs") as stacks:
        room = Room(config, _state(), work, stacks)
        try:
            yield room
        finally:
            room.close()


@contextmanager
def running_stacks(config: RunConfig, logs: Path) -> Iterator[tuple[str, ...]]:
    """Sockets of the stack processes that the recipe asks for; none when its trainer is embedded.

    Raises:
        ConfigError: a device that is not there, or a process that does not start.
    """
    if config.inner.trainer != "stacked":
        yield ()
        return
    from nestling.engine.device import expand
    from nestling.inner.stack_host import StackHost

    folders = {name: base.folder for name, base in offered_bases(config.models, _state()).items()}
    devices = expand(config.inner.stack.devices)
    with StackHost(bases=folders, devices=devices, config=config.inner.stack, logs=logs) as host:
        yield host.sockets


def make_handlers(settings: Mapping[str, Any]) -> Handlers:
    """What a worker of the fleet can do; called inside the worker."""
    config = RunConfig.model_validate(settings["config"])
    run = Path(settings["run"])
    stacks = tuple(settings.get("stacks", ()))
    room = Room(config, Path(settings["state"]), run / "models", stacks)
    room.warm()
    return job_handlers(room, ArtifactStore(run / "artifacts"), _stage_seconds(config))


# --- the controller --------------------------------------------------------------------------


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
                agent = await _open_agent(config, run, writer)
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
async def open_fleet(
    config: RunConfig, run: RunDir, writer: GroupCommit
) -> AsyncIterator[FleetRunner]:
    """The run's workers and a job runner over them."""
    refuse_distant_stacks(config)
    with running_stacks(config, run.root / "logs") as stacks:
        async with _open_fleet(config, run, writer, stacks) as fleet:
            yield fleet


def _refuse_unjailed(config: RunConfig) -> None:
    """prime-rl has the job's code in its own processes: on a rented pod, or because somebody says so."""
    if config.inner.trainer != "prime_rl":
        return
    if config.fleet.kind != "runpod" and not config.inner.prime_rl.unjailed:
        raise ConfigError(
            "inner.trainer = 'prime_rl' runs agent-written code outside the jail, with the rights of this user; expected "
            "fleet.kind = 'runpod', where a machine does nothing else; or, on a machine that may be lost, set "
            "inner.prime_rl.unjailed = true (docs/prime-rl.md)"
        )
    if config.models.shipped:
        raise ConfigError(
            "models.shipped = true with inner.trainer = 'prime_rl'; expected open models only, as prime-rl knows no "
            "others; set models.shipped = false and name them in models.extra"
        )


def refuse_distant_stacks(config: RunConfig) -> None:
    """ConfigError when the workers of a stacked recipe would be on other machines."""
    if config.inner.trainer == "stacked" and config.fleet.kind != "local":
        raise ConfigError(
            f"inner.trainer = 'stacked' with fleet.kind = {config.fleet.kind!r}; expected fleet.kind = "
            "'local', as a stack serves the workers of its own machine; or set inner.trainer to embedded"
        )


@asynccontextmanager
async def _open_fleet(
    config: RunConfig, run: RunDir, writer: GroupCommit, stacks: tuple[str, ...]
) -> AsyncIterator[FleetRunner]:
    clock = SystemClock()
    limits: PoolLimits | None = None
    if isinstance(config.fleet, RunpodFleet):
        provider: Provider = await open_pod_provider(config, run, writer)
        size = config.fleet.workers
        limits = PoolLimits(idle_s=config.fleet.idle_s, start_timeout_s=config.fleet.ready_s)
    else:
        provider, size = _open_provider(config, run, writer, stacks)
    runner_settings = RunnerSettings(
        identity=_identity(config),
        bounds=bounds_of(config.models, config.inner.trainer),
        deadlines=_stage_seconds(config),
        machine=config.fleet.machine,
        lane=provider.lane,
    )
    with open_account() as account:
        budget = Budget(
            writer.store, clock=clock, caps=config.budget, prices=load_prices(), account=account
        )
        async with running_fleet(
            writer=writer,
            provider=provider,
            size=size,
            artifacts=ArtifactStore(run.root / "artifacts"),
            settings=runner_settings,
            clock=clock,
            budget=budget,
            limits=limits,
            guard=provider.guard if isinstance(provider, LocalProvider) else None,
            predictor=Predictor(account.history, config.fleet.machine),
        ) as fleet:
            yield fleet


def open_account() -> Account:
    """The account file of the state folder; close it."""
    return Account(_state() / _ACCOUNT_FILE)


def plan_run(config: RunConfig) -> RunPlan:
    """What a run of this recipe may ask of its workers, and the ceiling of its cost.

    Raises:
        ConfigError: as `check_names`.
    """
    check_names(config)
    outer, seconds = config.outer, _stage_seconds(config)
    training = outer.steps * outer.groups_per_step * outer.group_size
    every = outer.held_out.every_steps
    swept: tuple[str, ...] = config.families.held_out if every else ()
    if swept and config.references.training_families:
        swept = (*config.families.training, *swept)
    checkpoints = len({*range(every, outer.steps + 1, every), outer.steps}) if every else 0
    arms = len(config.references.arms) + 1 + checkpoints
    episodes = {
        "training": training,
        "sweeps": len(set(swept)) * outer.held_out.episodes * arms,
    }
    attempts = config.reward.weights.max_attempts
    kinds = {"check": attempts, "run": 1}
    work = [
        PlannedWork(
            what=what,
            kind=kind,
            most_jobs=number * each,
            deadline_s=getattr(seconds, kind) + GRACE_S,
        )
        for what, number in episodes.items()
        for kind, each in kinds.items()
        if number
    ]
    families = {*config.families.training, *swept}
    work.append(
        PlannedWork(
            what="baselines",
            kind="baseline",
            most_jobs=len(families),
            deadline_s=seconds.baseline + GRACE_S,
        )
    )
    machine = config.fleet.machine
    with open_account() as account:
        expected = expected_job(account.history, machine, sorted(families))
    return RunPlan(
        machine=machine,
        usd_per_hour=load_prices()[machine].usd_per_hour,
        num_workers=_num_workers(config),
        work=work,
        max_tries=RunnerSettings(identity={}).max_tries,
        expected=expected,
        caps_usd={name: usd for name, usd in config.budget.model_dump().items() if usd is not None},
    )


def _num_workers(config: RunConfig) -> int:
    if isinstance(config.fleet, LocalFleet):
        return len(local_slots(config.fleet))
    return config.fleet.workers


async def open_pod_provider(config: RunConfig, run: RunDir, writer: GroupCommit) -> RunpodProvider:
    """Pods of a run whose recipe has `fleet.kind = "runpod"`; nothing is rented yet."""
    from nestling.fleet.providers.runpod_open import PodWork, open_provider

    assert isinstance(config.fleet, RunpodFleet)
    if config.inner.keep_models:
        raise ConfigError(
            "inner.keep_models keeps models where they are trained, which is on pods that are wiped "
            "with fleet.kind=runpod; expected false; or set fleet.kind to local"
        )
    state = _state()
    secret = EvalSecret.load_or_create(state / _SECRET_FILE)
    return await open_provider(
        config.fleet,
        PodWork(
            handlers=_HANDLERS,
            settings={"config": config.model_dump(mode="json")},
            private={_SECRET_FILE: secret.key},
        ),
        writer=writer,
        artifacts=ArtifactStore(run.root / "artifacts"),
        state=state,
        clock=SystemClock(),
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


def open_pod_account(api_url: str) -> PodAccount:
    """The account whose key is in the environment."""
    from nestling.fleet.providers.runpod_account import PodAccount
    from nestling.fleet.providers.runpod_open import open_api

    return PodAccount(open_api(api_url, SystemClock()))


def _open_provider(
    config: RunConfig, run: RunDir, writer: GroupCommit, stacks: tuple[str, ...]
) -> tuple[Provider, int]:
    """Where workers run, and how many."""
    assert not isinstance(config.fleet, RunpodFleet)
    state = _state()
    secret = EvalSecret.load_or_create(state / _SECRET_FILE)
    settings = {"config": config.model_dump(mode="json")}
    if isinstance(config.fleet, RayFleet):
        from nestling.fleet.providers.ray_cluster import RayProvider, RaySlots

        if config.inner.keep_models:
            raise ConfigError(
                "inner.keep_models keeps models where they are trained, which is on other machines "
                "with fleet.kind=ray; expected false; or set fleet.kind to local"
            )
        slots = RaySlots(
            handlers=_HANDLERS,
            settings=settings,
            private={_SECRET_FILE: secret.key},
            artifacts=ArtifactStore(run.root / "artifacts"),
            logs=run.root / "logs",
            **config.fleet.model_dump(exclude={"kind"}),
        )
        return RayProvider(slots, writer), config.fleet.workers

    if not config.unsafe_no_jail:
        require_bubblewrap()
    dealt = local_slots(config.fleet)
    workers = LocalWorkers(
        handlers=_HANDLERS,
        settings=settings
        | {"run": str(run.root.resolve()), "state": str(state.resolve()), "stacks": stacks},
        logs=run.root / "logs",
        machine=config.fleet.machine,
        slots=dealt,
        memory=memory_limits(
            worker_gib=config.fleet.worker_memory_gib,
            num_workers=len(dealt),
            least_free_gib=config.fleet.least_free_gib,
        ),
    )
    return LocalProvider(workers, writer), len(dealt)


def local_slots(fleet: LocalFleet) -> list[Slot]:
    """The workers of this machine and what each has.

    Raises:
        ConfigError: more workers than its cores or GPUs have room for.
        FleetError: `gpus = "auto"` and the driver does not answer.
    """
    return deal(
        cores_here(),
        gpus=find_gpus() if fleet.gpus == "auto" else fleet.gpus,
        workers=fleet.workers,
        threads=fleet.threads,
        gpu_job_gib=fleet.gpu_job_gib,
        pin=fleet.pin_cores,
    )


def open_learner(config: RunConfig, run: RunDir) -> EmbeddedLearner:
    """The agent as a learner in this process; its states are kept in the run folder."""
    from nestling.engine.checkpoint import load_model
    from nestling.outer.learners.embedded import EmbeddedLearner

    model = load_model(agent_folder(config.agent.model), config.agent.device)
    settings = config.learner if isinstance(config.learner, EmbeddedConfig) else EmbeddedConfig()
    sessions = max(settings.num_sessions, config.outer.max_parallel_episodes)
    return EmbeddedLearner(
        model,
        run.root / "learner",
        max_total_tokens=config.outer.max_total_tokens,
        config=settings.model_copy(update={"num_sessions": sessions}),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agent:
    """What is trained, and how it reads and writes."""

    learner: EmbeddedLearner | TinkerLearner
    tokenizer: Tokenizer
    chat: ChatTemplate | None = None
    costs: Callable[[], dict[str, float]] | None = None
    """What the service billed since the last call, by metric."""


async def _open_agent(config: RunConfig, run: RunDir, writer: GroupCommit) -> _Agent:
    if not isinstance(config.learner, TinkerConfig):
        embedded = open_learner(config, run)
        return _Agent(learner=embedded, tokenizer=embedded.tokenizer)
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
    return _Agent(learner=learner, tokenizer=chat.tokenizer, chat=chat, costs=learner.costs)


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


def check_names(config: RunConfig) -> None:
    """Refuse names that nothing goes by, before anything is started.

    Raises:
        ConfigError: a family, an agent or a machine type is unknown.
    """
    _refuse_unjailed(config)
    for family in (*config.families.training, *config.families.held_out):
        get(family)
    agent_folder(config.agent.model)
    prices = load_prices()
    if config.fleet.machine not in prices:
        raise ConfigError(
            f"fleet.machine = {config.fleet.machine!r} has no price; expected one of "
            f"{', '.join(sorted(prices))}; choose one, or add it to the price table"
        )


def agent_folder(name: str) -> Path:
    """Folder of a shipped agent, or the folder that was named."""
    shipped = AGENTS_FOLDER / name
    if shipped.is_dir():
        return shipped
    if Path(name).is_dir():
        return Path(name)
    known = sorted(path.name for path in AGENTS_FOLDER.glob("*") if path.is_dir())
    raise ConfigError(
        f"no agent {name!r}; expected one of {', '.join(known)}, or a model folder; check agent.model"
    )


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


async def _train(
    config: RunConfig,
    fleet: FleetRunner,
    agent: _Agent,
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
    secret = EvalSecret.load_or_create(_state() / _SECRET_FILE)
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


def _state() -> Path:
    state = state_folder()
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"the state folder {state} cannot be made: {error.strerror}; expected a writable "
            "place for baselines and the eval secret; set NESTLING_STATE to another folder"
        ) from error
    return state


def _stage_seconds(config: RunConfig) -> StageSeconds:
    inner = config.inner
    return StageSeconds(
        run=inner.train_wall_s + 3 * inner.score_wall_s,
        baseline=2
        * len(bounds_of(config.models, config.inner.trainer).base_models)
        * inner.score_wall_s,
    )


_NO_RESULT: Final = {"keep", "parallel", "start_s", "request_s", "retries", "restarts"}
"""Of a server: how it is asked, not what it answers."""


def _identity(config: RunConfig) -> dict[str, Any]:
    """Everything beside bundle and family that changes a job's result."""
    return {
        "trainer": config.inner.trainer,
        **({"stack": _stack_identity(config)} if config.inner.trainer == "stacked" else {}),
        **(
            {"openai": config.inner.openai.model_dump(mode="json", exclude=_NO_RESULT)}
            if config.inner.scorer == "openai"
            else {}
        ),
        "seed": config.inner.seed,
        "eval_items": config.inner.eval_items,
        "bases": {
            name: base.sha256 for name, base in offered_bases(config.models, _state()).items()
        },
        **({} if config.models.device == "cpu" else {"device": config.models.device}),
        "leak_items": config.inner.leak_items,
    }


def _stack_identity(config: RunConfig) -> dict[str, Any]:
    """What of a stack may change rounding."""
    return config.inner.stack.model_dump(mode="json", exclude={"max_jobs", "memory_gib"})
