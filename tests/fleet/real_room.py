"""The real machine room: probe, trainer and scorer, made once per worker."""

from __future__ import annotations

from pathlib import Path

from nestling.core.rundir import ArtifactStore
from nestling.fleet.handlers import job_handlers
from nestling.inner.baselines import Baselines
from nestling.inner.run import InnerContext, run_job
from nestling.inner.scorers.embedded import EmbeddedScorer
from nestling.inner.trainers.embedded import EmbeddedTrainer
from nestling.jobs.env_zygote import Zygote
from nestling.jobs.jail import Jail
from nestling.jobs.probe import probe
from nestling.jobs.probe_env import JailedOpener


class Room:
    def __init__(self, settings) -> None:
        bases = {name: Path(folder) for name, folder in settings["bases"].items()}
        jail = Jail()
        self._zygote = Zygote(jail)
        self._opener = JailedOpener(jail=jail, starter=self._zygote)
        scorer = EmbeddedScorer(secret_path=Path(settings["secret"]), bases=bases)
        scorer.start()
        self._bases = sorted(bases)
        self._context = InnerContext(
            trainer=EmbeddedTrainer(jail=jail, starter=self._zygote),
            scorer=scorer,
            baselines=Baselines(scorer, bases, folder=Path(settings["state"])),
            bases=bases,
            work_folder=Path(settings["work"]),
            n=8,
        )

    def check(self, bundle, family):
        return probe(bundle, family, env_opener=self._opener)

    def run(self, bundle, family, log):
        return run_job(bundle, family, self._context, log)

    def baselines(self, family):
        baselines = self._context.baselines
        return {name: baselines.get(name, family, "a", 8).mean for name in self._bases}


def make_handlers(settings):
    return job_handlers(Room(settings), ArtifactStore(Path(settings["artifacts"])))
