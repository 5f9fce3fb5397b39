"""A job runner that reads but never runs: enough of the probe to play demonstrations by the thousand.

Files, schema and static checks are the probe's own. The rubric stage knows the demonstrator's
rubrics by their text, so it answers with the very message that the real probe gives for them; a
test plays the same episodes against the real probe and compares. Agent code is not executed.
"""

from __future__ import annotations

from typing import Final

from nestling.core.errors import JobRejectedError, Problem
from nestling.jobs.bundle import Bundle
from nestling.jobs.outcome import Outcome
from nestling.jobs.probe import ProbeReport
from nestling.jobs.probe_static import static_problems
from nestling.jobs.template import TASKSET_PATH

__all__ = ["PaperRunner"]

_BASELINES: Final = {"nano": 0.4, "micro": 0.6}
_CONTAINS: Final = "self.data.answer in trace.last_reply"
_EQUALS: Final = "parse_answer(trace.last_reply) == self.data.answer"
_FORMED: Final = "parse_answer(trace.last_reply) is not None"
_NAME_ERROR: Final = "scoring failed: NameError: name 'answer' is not defined"


class PaperRunner:
    """Satisfies `JobRunner`; a job it accepts is never trained and comes back as lost."""

    def __init__(self, baselines: dict[str, float] | None = None) -> None:
        self._baselines = baselines or _BASELINES

    async def check(self, bundle: Bundle, family: str) -> ProbeReport:
        """The stages that need no execution."""
        del family
        problems = _problems(bundle)
        return ProbeReport(ok=not problems, problems=tuple(problems[:5]))

    async def run(self, bundle: Bundle, family: str) -> Outcome:
        """Never trains."""
        return Outcome(
            job_hash=bundle.job_hash,
            family=family,
            base_model=bundle.manifest().base_model,
            status="lost",
            reason="paper.not_run",
        )

    async def baselines(self, family: str) -> dict[str, float]:
        """The scores given at construction, the same for every family."""
        del family
        return self._baselines


def _problems(bundle: Bundle) -> list[Problem]:
    try:
        bundle.manifest()
    except JobRejectedError as error:
        return error.problems
    problems = static_problems(bundle.files)
    if problems:
        return problems
    source = bundle.files[TASKSET_PATH].decode()
    if "== answer)" in source:
        return [_rubric("error", _NAME_ERROR, "a number", "correct the reward")]
    if _CONTAINS in source or _EQUALS in source:
        return []
    means = "1.00, constant 1.00" if _FORMED in source else "0.38, busy 1.00"
    wrong = f"the correct answer does not beat the rest: {means}"
    return [_rubric("oracle", wrong, "more", f"reward {_EQUALS} most")]


def _rubric(code: str, wrong: str, expected: str, fix: str) -> Problem:
    return Problem(stage="rubric", code=f"rubric.{code}", wrong=wrong, expected=expected, fix=fix)
