"""What a run may ask of its workers and the most that can cost, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Expected", "PlannedWork", "RunPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What past jobs of this machine type say about one job."""

    seconds: float
    """Median of the newest, each family counting the same."""
    num_jobs: int
    """Past jobs behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWork:
    """One kind of work for one purpose."""

    what: str
    """For a person: training, sweeps, baselines."""
    kind: str
    """check, run or baseline."""
    most_jobs: int
    """No run of the recipe asks for more; the same job is done once, so it is often fewer."""
    deadline_s: float
    """Longest time one try may take; a worker over it is ended."""

    def usd(self, usd_per_hour: float) -> float:
        """Every job to its deadline, once."""
        return self.most_jobs * self.deadline_s / 3600 * usd_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """All of it, with prices and caps."""

    machine: str
    usd_per_hour: float
    """Of one worker."""
    num_workers: int
    work: Sequence[PlannedWork]
    max_tries: int
    """A job whose worker died is tried again so often in all."""
    expected: Expected | None
    """Of one training job; None without a past on this machine type."""
    caps_usd: dict[str, float]
    """Caps that are set, by name."""
    apart: Sequence[str] = ()
    """For a person: what is billed by others than the workers, and its caps."""

    @property
    def ceiling_usd(self) -> float:
        """Every job takes its whole deadline and none is tried again."""
        return sum(one.usd(self.usd_per_hour) for one in self.work)

    @property
    def worst_usd(self) -> float:
        """Every job is tried as often as is allowed, each try to its deadline; or the run's cap."""
        return min(self.ceiling_usd * self.max_tries, self.caps_usd.get("run_usd", float("inf")))

    @property
    def num_run_jobs(self) -> int:
        """Jobs that train."""
        return sum(one.most_jobs for one in self.work if one.kind == "run")

    @property
    def expected_usd(self) -> float | None:
        """All jobs that train, at the expected time."""
        if self.expected is None:
            return None
        return self.num_run_jobs * self.expected.seconds / 3600 * self.usd_per_hour

    @property
    def expected_s(self) -> float | None:
        """Wall time of all jobs that train if the workers are always busy."""
        if self.expected is None:
            return None
        return self.num_run_jobs * self.expected.seconds / self.num_workers

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {
            "ceiling_usd": round(self.ceiling_usd, 6),
            "worst_usd": round(self.worst_usd, 6),
            "expected_usd": self.expected_usd,
            "expected_s": self.expected_s,
        }

    def lines(self) -> list[str]:
        """The plan for a person."""
        lines = [
            f"{self.num_workers} workers of {self.machine} at {self.usd_per_hour:g} USD an hour each"
        ]
        lines += [
            f"{one.what}: at most {one.most_jobs} jobs ({one.kind}) of at most "
            f"{one.deadline_s:.0f} s = {one.usd(self.usd_per_hour):.2f} USD"
            for one in self.work
        ]
        lines.append(self._expectation())
        lines.append(
            f"ceiling: {self.ceiling_usd:.2f} USD with every job at its deadline; "
            f"{self.worst_usd:.2f} USD if every job is also tried {self.max_tries} times"
        )
        caps = ", ".join(f"{name} {usd:g}" for name, usd in self.caps_usd.items())
        lines.append(f"caps: {caps or 'none; set budget.run_usd to have one'}")
        return [*lines, *(f"apart from that: {one}" for one in self.apart)]

    def _expectation(self) -> str:
        if self.expected is None:
            return f"expected: unknown, as no job has run on {self.machine} yet"
        assert self.expected_s is not None
        return (
            f"expected: {self.num_run_jobs} jobs of about {self.expected.seconds:.0f} s (median of "
            f"{self.expected.num_jobs} past jobs on {self.machine}) = {self.expected_usd:.2f} USD, "
            f"about {self.expected_s / 3600:.1f} h with all workers busy"
        )
