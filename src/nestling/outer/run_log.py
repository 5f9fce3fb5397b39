"""What the outer loop asks of the run's memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from pydantic import Field

from nestling.core.frozen import Frozen
from nestling.outer.batch import DeadEpisode, FinishedGroup, PlayedEpisode
from nestling.outer.plan import EpisodePlan, GroupPlan
from nestling.outer.step_report import StepReport
from nestling.outer.sweep_report import Sweep

__all__ = ["Progress", "RunLog"]


class Progress(Frozen):
    """Where a run stands after its last committed step."""

    step: int = Field(ge=0)
    """Steps committed; 0 when only the untrained learner was saved."""
    version: int = Field(ge=0)
    """Updates made; lower than `step` when steps were skipped."""
    learner_ref: str
    """What `Learner.load` takes."""
    plan: str
    """`plan_digest` of the run."""
    spent_below: int = Field(0, ge=0)
    """All groups below this index were used by a step and are never used again."""
    spent_beyond: tuple[int, ...] = ()
    """The others that were, ascending."""

    def is_spent(self, group: int) -> bool:
        """Whether a step has used this group."""
        return group < self.spent_below or group in self.spent_beyond

    def spend(self, groups: Iterable[int]) -> tuple[int, tuple[int, ...]]:
        """`spent_below` and `spent_beyond` once these groups are used too."""
        below, beyond = self.spent_below, {*self.spent_beyond, *groups}
        while below in beyond:
            beyond.remove(below)
            below += 1
        return below, tuple(sorted(beyond))


class RunLog(Protocol):
    """Durable memory of one run; each writing call is one transaction and may be repeated.

    A write is on disk when the call returns; once begun it is made even if the caller is cancelled.

    Raises `StoreError` when the memory is damaged, busy for too long or full; the run then stops
    and can be resumed.
    """

    async def progress(self) -> Progress | None:
        """The last committed state; None for a new run."""
        ...

    async def finished_episodes(self, groups: Sequence[GroupPlan]) -> list[PlayedEpisode]:
        """Episodes of these groups that finished, with their tokens."""
        ...

    async def learner_ref(self, version: int) -> str | None:
        """Where the weights of a version are saved; None when they are not."""
        ...

    async def group_opened(self, group: GroupPlan) -> Mapping[str, int]:
        """A group was admitted, perhaps not for the first time.

        Returns the episodes that were cut off after a turn, with the version that said it.
        """
        ...

    async def episode_started(self, plan: EpisodePlan, version: int) -> None:
        """An episode begins with weights `version`, perhaps not for the first time.

        Turns recorded with another version are forgotten, and the restart is recorded.
        """
        ...

    async def episode_finished(self, episode: PlayedEpisode) -> None:
        """An episode came to its end; from now on it is never played again."""
        ...

    async def episode_died(self, episode: DeadEpisode) -> None:
        """An episode broke down; a resumed run tries it again until a step has used its group."""
        ...

    async def commit_step(
        self, progress: Progress, report: StepReport | None, groups: Sequence[FinishedGroup]
    ) -> None:
        """The step is done: all three become visible together, or not at all.

        `report` is None for step 0, the untrained learner. Dead episodes of `groups`, the groups
        the step has used, stay dead from now on.
        """
        ...

    async def sweep_done(self, step: int, sweep: Sweep) -> None:
        """Keep what a sweep after `step` found; a later sweep of the step replaces it."""
        ...
