"""A job runner that reads but never runs: enough of the probe to play demonstrations by the thousand.

Files, schema and static checks are the probe's own. The rubric stage knows the demonstrator's
rubrics by their text, so it answers with the very message that the real probe gives for them; a
test plays the same episodes against the real probe and compares. Agent code is not executed.
"""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Final

from nestling.core.errors import JobRejectedError, Problem
from nestling.families.registry import get
from nestling.jobs.bundle import Bundle
from nestling.jobs.outcome import Outcome
from nestling.jobs.probe import PLAYED_ROWS, ProbeReport
from nestling.jobs.probe_static import static_problems
from nestling.jobs.template import TASKSET_PATH

__all__ = ["PaperRunner"]

_NUM_ROWS: Final = 512
"""Rows of the template's data set."""
_SPAN: Final = re.compile(r"^LO, HI = (\d+), (\d+)$", re.MULTILINE)
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
        problems = _problems(bundle, family)
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


def _problems(bundle: Bundle, family: str) -> list[Problem]:
    try:
        most_turns = bundle.manifest().prime_rl.max_turns
    except JobRejectedError as error:
        return error.problems
    problems = static_problems(bundle.files)
    if problems:
        return problems
    source = bundle.files[TASKSET_PATH].decode()
    span = _SPAN.search(source)
    if span is not None:
        needed = _turns_needed(family, int(span[1]), int(span[2]))
        if sum(turns > most_turns for turns in needed) * 2 > len(needed):
            return [_too_many_turns(max(needed), most_turns)]
    if "== answer)" in source:
        return [_rubric("error", _NAME_ERROR, "a number", "correct the reward")]
    if _CONTAINS in source or _EQUALS in source:
        return []
    means = "1.00, a wrong answer 1.00" if _FORMED in source else "0.47, many tool calls 1.00"
    wrong = f"the correct answer does not beat the rest: {means}"
    return [_rubric("oracle", wrong, "it to earn most", "reward equality with self.data.answer")]


@cache
def _turns_needed(family: str, lo: int, hi: int) -> list[int]:
    """Turns that the rows played by the probe take, for the template's own data set."""
    rng = random.Random(0)
    rows = [get(family).sample(rng, lo, hi) for _ in range(_NUM_ROWS)]
    return [rows[_NUM_ROWS * i // PLAYED_ROWS].num_calls + 1 for i in range(PLAYED_ROWS)]


def _too_many_turns(needed: int, most: int) -> Problem:
    return Problem(
        stage="tools",
        code="tools.max_turns",
        wrong=f"rows need {needed} turns, max_turns is {most}",
        expected="rows that can be solved",
        fix=f"raise max_turns to {needed} or lower the difficulty",
    )


def _rubric(code: str, wrong: str, expected: str, fix: str) -> Problem:
    return Problem(stage="rubric", code=f"rubric.{code}", wrong=wrong, expected=expected, fix=fix)
