"""The machine room of one worker: everything that a job needs, by the recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nestling.config import RunConfig
from nestling.core.clock import SystemClock
from nestling.core.rundir import ArtifactStore, write_atomic
from nestling.core.seeds import derive_seed
from nestling.engine.tokenizer import Tokenizer
from nestling.families.splits import EvalSecret, commitment
from nestling.fleet.handlers import StageSeconds, job_handlers
from nestling.fleet.worker import Handlers
from nestling.inner.baselines import Baselines
from nestling.inner.models_config import bounds_of, offered_bases
from nestling.inner.run import InnerContext, run_job
from nestling.inner.scorer import Scorer
from nestling.inner.trainer import Trainer, TrainLimits
from nestling.jobs.budget import Caps
from nestling.jobs.bundle import Bundle
from nestling.jobs.jail import Jail, JailLimits
from nestling.jobs.leaks import LeakIndex
from nestling.jobs.outcome import Outcome, StepRecord
from nestling.jobs.probe import ProbeOptions, ProbeReport, probe
from nestling.jobs.probe_env import JailedOpener
from nestling.wiring.prices import worker_prices
from nestling.wiring.state import LEAKS_FOLDER, SECRET_FILE, make_state_folder

__all__ = [
    "Room",
    "load_leak_index",
    "make_handlers",
    "running_stacks",
    "stage_seconds",
]


class Room:
    """The machine room of one worker: warm jail zygote, trainer, scorer, baselines, leak indexes."""

    def __init__(
        self, config: RunConfig, state: Path, work: Path, stacks: tuple[str, ...] = ()
    ) -> None:
        """`stacks`: sockets from `running_stacks`, when the recipe's trainer is stacked."""
        from nestling.jobs.env_zygote import Zygote

        self._config = config
        self._state = state
        self._secret_path = state / SECRET_FILE
        jail = Jail(unsafe=config.unsafe_no_jail)
        self._zygote = None if config.unsafe_no_jail else Zygote(jail)
        self._bases = offered_bases(config.models, state)
        folders = {name: base.folder for name, base in self._bases.items()}
        self._scorer = self._make_scorer(folders, stacks)
        self.baselines_table = Baselines(self._scorer, folders, folder=state)
        self._opener = JailedOpener(jail=jail, starter=self._zygote)
        self._leaks: dict[str, LeakIndex | None] = {}
        self._tokenizers: dict[str, Tokenizer] = {}
        price = worker_prices(config)[config.fleet.machine]
        self.context = InnerContext(
            trainer=self._trainer(jail, stacks),
            scorer=self._scorer,
            baselines=self.baselines_table,
            bases=folders,
            bounds=bounds_of(config.models, config.inner.trainer),
            work_folder=work,
            keep_models=config.inner.keep_models,
            n=config.inner.eval_items,
            split=config.inner.split,
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
            tokenizer=self._tokenizer,
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

    def _tokenizer(self, base: str) -> Tokenizer:
        """A base model's own, read once."""
        if base not in self._tokenizers:
            self._tokenizers[base] = Tokenizer.load(self._bases[base].folder)
        return self._tokenizers[base]

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
            hidden = (self._secret_path, self._state / LEAKS_FOLDER)
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
    secret = EvalSecret.load_or_create(state / SECRET_FILE)
    path = state / LEAKS_FOLDER / f"{family}-{items}-v2-{commitment(secret, 'a')[:16]}.json"
    if path.exists():
        return LeakIndex.loads(path.read_bytes())
    index = LeakIndex.for_family(family, secret, hidden=items)
    write_atomic(path, index.dumps())
    path.chmod(0o600)
    return index


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

    folders = {
        name: base.folder
        for name, base in offered_bases(config.models, make_state_folder()).items()
    }
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
    return job_handlers(room, ArtifactStore(run / "artifacts"), stage_seconds(config))


def stage_seconds(config: RunConfig) -> StageSeconds:
    """Deadlines of the stages of a job."""
    inner = config.inner
    return StageSeconds(
        run=inner.train_wall_s + 3 * inner.score_wall_s,
        baseline=2
        * len(bounds_of(config.models, config.inner.trainer).base_models)
        * inner.score_wall_s,
    )
