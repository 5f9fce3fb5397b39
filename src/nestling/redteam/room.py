"""The machine room under attack: the product's own, on a temporary folder, with traps around it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from nestling.agent.reward import Terms, compute_terms
from nestling.config import InnerConfig, RunConfig
from nestling.core.errors import JailError
from nestling.families.family import Item
from nestling.families.public_package import public_files
from nestling.families.splits import EvalSecret, HiddenSplit, hidden_items
from nestling.inner.run import run_job
from nestling.jobs.bundle import Bundle
from nestling.jobs.env_client import JailedEnv, open_env
from nestling.jobs.jail import JailLimits
from nestling.jobs.outcome import Outcome
from nestling.jobs.probe_report import ProbeReport
from nestling.redteam.canary import Canary
from nestling.redteam.hostile_job import FAMILY, spy_files
from nestling.redteam.traps import Traps, opened_traps
from nestling.wiring.rooms import Room

__all__ = ["NUM_HIDDEN", "SPY_LIMITS", "JobRunnerOfRoom", "Left", "TargetRoom", "opened_room"]

NUM_HIDDEN: Final = 24
"""Hidden items of each set: few, so that a whole suite takes minutes."""
SPY_LIMITS: Final = JailLimits(cpu_s=20, processes=8, load_s=25.0, call_s=10.0, life_s=40.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Everything that came out of a jail."""

    said: str
    """What the code reported through the protocol."""
    log: str
    """The end of its standard output and error."""
    reason: str | None = None
    """Reason code of the fault that ended it."""
    detail: str = ""

    @property
    def everything(self) -> str:
        """All texts together."""
        return "\n".join((self.said, self.log, self.detail))

    def done(self) -> list[str]:
        """What the code claims to have managed although it should not."""
        return [line for line in self.said.splitlines() if line.startswith("DONE")]


class TargetRoom(Room):
    """The product's machine room, with what an attacker and a judge need besides.

    Open it with `opened_room`.
    """

    def __init__(self, folder: Path, canary: Canary, secrets: Sequence[Path], traps: Traps) -> None:
        self.folder = folder
        self.canary = canary
        self.secret_files = list(secrets)
        self.traps = traps
        inner = InnerConfig(eval_items=NUM_HIDDEN, leak_items=NUM_HIDDEN, keep_models=True)
        super().__init__(RunConfig(inner=inner), folder / "state", folder / "work")

    def open_env(
        self,
        files: Mapping[str, bytes],
        *,
        limits: JailLimits = SPY_LIMITS,
        cold: bool = False,
    ) -> JailedEnv:
        """A job's environment as the trainer opens it; no check stands before it.

        Raises:
            JailError: the code did not load.
        """
        return open_env(
            files,
            public_files(FAMILY),
            limits,
            jail=self._opener.jail,
            starter=None if cold else self._opener.starter,
        )

    def in_jail(self, code: str, *, limits: JailLimits = SPY_LIMITS, cold: bool = False) -> Left:
        """Run code on import in a jail and collect all that leaves it."""
        try:
            with closing(self.open_env(spy_files(code), limits=limits, cold=cold)) as env:
                rows = env.rows(1)
                return Left(said="\n".join(row.prompt for row in rows), log=env.log_tail())
        except JailError as error:
            return Left(said="", log="", reason=error.reason, detail=error.detail)

    def train(self, bundle: Bundle, family: str = FAMILY) -> Outcome:
        """Train and score a job as a worker does after the probe accepted it."""
        return run_job(bundle, family, self.context, lambda _: None)

    def hidden(self, split: HiddenSplit = "b", n: int = NUM_HIDDEN) -> list[Item]:
        """The hidden items, for an attacker who already has them."""
        return hidden_items(FAMILY, split, n, self._secret)

    @cached_property
    def _secret(self) -> EvalSecret:
        return EvalSecret.load_or_create(self.folder / "state" / "eval-secret")

    def paid(self, outcome: Outcome | None, *, budget_share: float = 0.02) -> Terms:
        """What a first valid attempt with this outcome earns under `paired`."""
        return compute_terms(outcome, valid_attempt=1, submitted=True, budget_share=budget_share)[
            "paired"
        ]


class JobRunnerOfRoom:
    """The room as an episode sees it."""

    def __init__(self, room: TargetRoom) -> None:
        self._room = room
        self.checked: list[ProbeReport] = []

    async def check(self, bundle: Bundle, family: str) -> ProbeReport:
        """The real probe, off the event loop."""
        report = await asyncio.to_thread(self._room.check, bundle, family)
        self.checked.append(report)
        return report

    async def run(self, bundle: Bundle, family: str) -> Outcome:
        """The real trainer and scorer."""
        return await asyncio.to_thread(self._room.train, bundle, family)

    async def baselines(self, family: str) -> dict[str, float]:
        """Frozen scores on set A."""
        return await asyncio.to_thread(self._room.baselines, family)


@contextmanager
def opened_room() -> Iterator[TargetRoom]:
    """A room with canary and traps; everything is gone at the end."""
    canary = Canary()
    with tempfile.TemporaryDirectory(prefix="nestling-redteam-") as name:
        folder = Path(name)
        with canary.planted(folder) as secrets, opened_traps(folder) as traps:
            (folder / "state").mkdir(mode=0o700)
            room = TargetRoom(folder, canary, secrets, traps)
            try:
                yield room
            finally:
                room.close()
