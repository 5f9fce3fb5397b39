"""What the probe found: shown to the agent, stored in the run, sent between processes."""

from __future__ import annotations

from nestling.core.errors import Problem
from nestling.core.frozen import Frozen

__all__ = ["STAGES", "Predicted", "ProbeReport", "StageReport"]

STAGES = ("files", "schema", "static", "load", "rows", "tools", "rubric", "rollout", "budget")
"""In the order in which they run; `budget` problems may also come from the schema stage."""

_MAX_LINE = 160


class Predicted(Frozen):
    """What running the job is expected to cost, both evaluations included."""

    cpu_s: float
    usd: float


class StageReport(Frozen):
    """One stage that ran."""

    name: str
    seconds: float


class ProbeReport(Frozen):
    """The verdict on one submission."""

    ok: bool
    problems: tuple[Problem, ...] = ()
    """All from the first stage that failed, five at most."""
    predicted: Predicted | None = None
    """None when the probe failed before the cost could be predicted."""
    seconds: float = 0.0
    stages: tuple[StageReport, ...] = ()

    @property
    def predicted_cpu_s(self) -> float | None:
        """CPU-seconds of the whole job, or None."""
        return None if self.predicted is None else self.predicted.cpu_s

    def lines(self) -> list[str]:
        """The problems as an agent reads them, each at most 160 characters."""
        return [clip_line(problem.line()) for problem in self.problems]


def clip_line(line: str) -> str:
    """One printable line of at most 160 characters."""
    text = "".join(c if c.isprintable() else " " for c in line)
    return text if len(text) <= _MAX_LINE else text[: _MAX_LINE - 3] + "..."
