"""What an episode needs of the machine room: check, run, baselines."""

from __future__ import annotations

from typing import Protocol

from nestling.jobs.bundle import Bundle
from nestling.jobs.outcome import Outcome
from nestling.jobs.probe import ProbeReport

__all__ = ["JobRunner"]


class JobRunner(Protocol):
    """Satisfied by the fleet; the agent does not know that a fleet exists."""

    async def check(self, bundle: Bundle, family: str) -> ProbeReport:
        """Run the probe; never raises for anything the agent wrote."""
        ...

    async def run(self, bundle: Bundle, family: str) -> Outcome:
        """Train and score a job that passed the probe; failure is an outcome, not an exception."""
        ...

    async def baselines(self, family: str) -> dict[str, float]:
        """Untrained score of every base model on hidden set A."""
        ...
