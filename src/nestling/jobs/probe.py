"""Check a job before any money is spent on it; every failure says how to fix it.

Stages run in order and the first that fails ends the probe, with all its problems (five at most):
files, schema, static, load, rows, tools, rubric, rollout, budget. From `load` on the job's own
package runs, in the jail, and everything it says is data here.

Rows made by `tools.sample` are solved by the family's own solver, which plays the oracle. Rows of
another making are answered at once with their own `answer`; without such a field nobody can say
what is right, and the rubric is only asked for finite, spread, repeatable rewards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from nestling.core.clock import Clock, SystemClock
from nestling.core.errors import JailError, JobRejectedError, Problem
from nestling.core.seeds import derive_seed, stream
from nestling.engine.tokenizer import Tokenizer
from nestling.families import vocabulary
from nestling.families.family import Family
from nestling.families.registry import get
from nestling.jobs.bounds import SMALL, Bounds
from nestling.jobs.budget import Caps, CoreSpeed, Workload, budget_problems, predict
from nestling.jobs.bundle import Bundle
from nestling.jobs.leaks import LeakIndex, leak_problems
from nestling.jobs.manifest import JobManifest
from nestling.jobs.probe_env import EnvOpener, JailedOpener
from nestling.jobs.probe_faults import fault_problem
from nestling.jobs.probe_policies import ORACLE, Lesson, lesson_of, most_common_answer
from nestling.jobs.probe_report import Predicted, ProbeReport, StageReport
from nestling.jobs.probe_rubric import rubric_problems
from nestling.jobs.probe_static import static_problems
from nestling.jobs.rollout_env import RolloutEnv, Row
from nestling.jobs.scripted_rollouts import Play, play_policies
from nestling.jobs.token_count import TokenCount
from nestling.jobs.worked_rows import MAX_WORKED_ROWS, turns_of

if TYPE_CHECKING:
    from nestling.engine.model import Model

__all__ = [
    "MAX_ROWS",
    "MIN_ROWS",
    "PLAYED_ROWS",
    "Predicted",
    "ProbeOptions",
    "ProbeReport",
    "StageReport",
    "played_rows",
    "probe",
]

MIN_ROWS: Final = 16
MAX_ROWS: Final = 4096
MAX_PROMPT_CHARS: Final = 8000
MAX_ROW_CHARS: Final = 32_000
MAX_DATA_CHARS: Final = 8_000_000
"""Of all rows as JSON; bounds the time of the leak scan."""

_MIN_DISTINCT: Final = 8
_MAX_PROBLEMS: Final = 5
PLAYED_ROWS: Final = 8
"""Spread evenly over the data set; every scripted policy plays each of them twice."""
_PARAMS: Final = MappingProxyType({"nano": 350_000, "micro": 1_600_000})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """Everything about a probe that is not the job."""

    bounds: Bounds = SMALL
    leaks: LeakIndex | None = None
    """Dev and hidden items; None skips the leak scan."""
    caps: Caps = field(default_factory=Caps)
    speed: CoreSpeed = field(default_factory=CoreSpeed)
    params: Mapping[str, int] = field(default_factory=lambda: dict(_PARAMS))
    """Size of each base model, for predictions made without the model itself."""
    tokenizer: Callable[[str], Tokenizer] | None = None
    """Of a base model by name, to count tokens without the model itself; None: all have the shipped vocabulary."""
    eval_items: int = 200
    model_rollouts: int = 4
    """Real rollouts when a model is given."""
    seed: int = 0
    clock: Clock = field(default_factory=SystemClock)


def probe(
    bundle: Bundle,
    family: str,
    *,
    env_opener: EnvOpener | None = None,
    model: Model | None = None,
    options: ProbeOptions | None = None,
) -> ProbeReport:
    """The verdict on a job; nothing the job does makes this raise.

    Args:
        bundle: the frozen submission.
        family: what it must teach.
        env_opener: how to start its environment; a cold jail unless given.
        model: the base model it chose, for a few real rollouts.
        options: bounds, leak index, caps.

    Raises:
        ConfigError: the family is unknown, or the jail is not installed.
    """
    run = _Probe(bundle, get(family), model, options or ProbeOptions())
    return run.run(env_opener or JailedOpener())


def played_rows(count: int) -> list[int]:
    """Which of `count` rows the scripted policies play."""
    return [i * count // PLAYED_ROWS for i in range(PLAYED_ROWS)]


class _Probe:
    """One probe; every stage adds to what is known."""

    def __init__(
        self, bundle: Bundle, family: Family, model: Model | None, options: ProbeOptions
    ) -> None:
        self._bundle = bundle
        self._family = family
        self._model = model
        self._options = options
        self._clock = options.clock
        self._stages: list[StageReport] = []
        self._problems: list[Problem] = []
        self._manifest: JobManifest | None = None
        self._rows: list[Row] = []
        self._lessons: list[Lesson] = []
        self._plays: Mapping[tuple[str, int], Play] = {}
        self._workload: Workload | None = None
        self._predicted: Predicted | None = None

    def run(self, opener: EnvOpener) -> ProbeReport:
        """All stages until one fails."""
        began = self._clock.monotonic()
        if (
            self._stage("files", self._check_files)
            and self._stage("schema", self._check_manifest)
            and self._stage("static", lambda: static_problems(self._bundle.files))
        ):
            self._run_in_env(opener)
        return ProbeReport(
            ok=not self._problems,
            problems=tuple(self._problems[:_MAX_PROBLEMS]),
            predicted=self._predicted,
            seconds=round(self._clock.monotonic() - began, 3),
            stages=tuple(self._stages),
        )

    def _run_in_env(self, opener: EnvOpener) -> None:
        opened: list[RolloutEnv] = []

        def load() -> list[Problem]:
            opened.append(opener(self._bundle, self._family.name, self._known_manifest()))
            return []

        if not self._stage("load", load):
            return
        with closing(opened[0]) as env:
            stages: list[tuple[str, Callable[[], list[Problem]]]] = [
                ("rows", lambda: self._check_rows(env)),
                ("tools", lambda: self._check_tools(env)),
                ("rubric", lambda: self._check_rubric(env)),
                ("rollout", lambda: self._check_rollouts(env)),
                ("budget", self._check_budget),
            ]
            for name, check in stages:
                if not self._stage(name, check):
                    return

    def _stage(self, name: str, check: Callable[[], list[Problem]]) -> bool:
        """Run one stage; a fault of the environment is a problem of the stage it struck."""
        began = self._clock.monotonic()
        try:
            self._problems = check()
        except JobRejectedError as error:
            self._problems = error.problems
        except JailError as error:
            self._problems = [fault_problem(name, error)]
        seconds = round(self._clock.monotonic() - began, 3)
        self._stages.append(StageReport(name=name, seconds=seconds))
        return not self._problems

    def _check_files(self) -> list[Problem]:
        actual = Bundle.from_files(self._bundle.files)
        if actual.job_hash != self._bundle.job_hash:
            return [
                _problem("files", "hash", "the files changed", "the frozen files", "submit again")
            ]
        return []

    def _check_manifest(self) -> list[Problem]:
        self._manifest = self._bundle.manifest(self._options.bounds)
        return []

    def _known_manifest(self) -> JobManifest:
        assert self._manifest is not None
        return self._manifest

    def _check_rows(self, env: RolloutEnv) -> list[Problem]:
        rows = env.rows(MAX_ROWS + 1)
        if len(rows) > MAX_ROWS:
            return [_rows("too_many", "load() yields too many rows", f"at most {MAX_ROWS}", "stop")]
        if len(rows) < MIN_ROWS:
            wrong, expected = f"load() yields {len(rows)} rows", f"{MIN_ROWS}..{MAX_ROWS}"
            return [_rows("too_few", wrong, expected, "yield more rows")]
        self._rows = rows
        return (
            _prompt_problems(rows)
            or self._label_problems()
            or self._worked_problems()
            or ([] if self._options.leaks is None else self._leak_problems(self._options.leaks))
        )

    def _label_problems(self) -> list[Problem]:
        """Solve a few rows; their labels must be what their own tools lead to."""
        common = most_common_answer(self._rows)
        chosen = [self._rows[index] for index in played_rows(len(self._rows))]
        self._lessons = [
            lesson_of(row, self._family, (), common, derive_seed(self._options.seed, row.index))
            for row in chosen
        ]
        return [
            _rows(
                "wrong_answer",
                f"row {lesson.row.index} says answer {str(lesson.answer)[:20]}, its tools lead to"
                f" {lesson.found[:20]}",
                "the true answer",
                "keep the answer of sample()",
            )
            for lesson in self._lessons
            if lesson.found is not None and lesson.found != lesson.answer
        ]

    def _worked_problems(self) -> list[Problem]:
        """A warm-up on the job's own rows needs some that say what the model's turns are."""
        sft = self._known_manifest().sft
        if sft is None or sft.source != "rows":
            return []
        try:
            if any(turns_of(row) for row in self._rows[:MAX_WORKED_ROWS]):
                return []
        except ValueError as error:
            return [_rows("turns", str(error), "the model's turns as text", "correct turns")]
        fix = 'add turns to your Data, or write source = "dev"'
        return [_rows("turns", "no row has turns", 'some, with [sft] source = "rows"', fix)]

    def _leak_problems(self, index: LeakIndex) -> list[Problem]:
        files = {path: data for path, data in self._bundle.files.items() if path != "job.toml"}
        return leak_problems(index, self._rows, files)

    def _check_tools(self, env: RolloutEnv) -> list[Problem]:
        schemas = env.tool_schemas()
        names = [str(schema.get("function", {}).get("name", "")) for schema in schemas]
        expected = self._family.tool_signatures
        if not names:
            fix = "return [Tools(config.tools)] from Task.toolsets"
            return [_problem("tools", "none", "the task has no tools", "the family's tools", fix)]
        used = {name for lesson in self._lessons for _, name, _ in lesson.solution}
        missing = sorted(used - set(names))
        if missing:
            fix = "return [Tools(config.tools)] from Task.toolsets"
            wrong = f"tool {missing[0]} is missing"
            return [_problem("tools", "missing", wrong, expected[:40], fix)]
        self._lessons = [replace(lesson, schemas=tuple(schemas)) for lesson in self._lessons]
        return self._turn_problems()

    def _turn_problems(self) -> list[Problem]:
        """When no row can be solved within the job's own `max_turns`, none teaches anything."""
        most = self._known_manifest().prime_rl.max_turns
        needed = [len(lesson.solution) + 1 for lesson in self._lessons]
        if min(needed) <= most:
            return []
        fix = f"raise max_turns to {max(needed)} or lower the difficulty"
        wrong = f"rows need {min(needed)} turns or more, max_turns is {most}"
        return [_problem("tools", "max_turns", wrong, "rows that can be solved", fix)]

    def _check_rubric(self, env: RolloutEnv) -> list[Problem]:
        tokens = TokenCount(self._tokenizer(), self._lessons[0].schemas)
        order = stream(self._options.seed, "probe order")
        self._plays = play_policies(env, self._lessons, tokens)
        again = play_policies(env, self._lessons, tokens, order=order)
        has_oracle = all(lesson.answer is not None for lesson in self._lessons)
        return rubric_problems(self._plays, again, has_oracle=has_oracle)

    def _tokenizer(self) -> Tokenizer:
        """Of the base model that the job chose."""
        if self._model is not None:
            return self._model.tokenizer
        tokenizer_of = self._options.tokenizer
        if tokenizer_of is None:
            return vocabulary.tokenizer()
        return tokenizer_of(self._known_manifest().base_model)

    def _check_rollouts(self, env: RolloutEnv) -> list[Problem]:
        """A few rollouts with the base model itself, or a prediction from the oracle's."""
        manifest = self._known_manifest()
        if self._model is None:
            self._workload = self._scripted_workload(manifest)
            return []
        from nestling.jobs.probe_rollouts import measure  # torch is heavy and not always needed

        options = self._options
        played = [lesson.row for lesson in self._lessons[: options.model_rollouts]]
        measured = measure(
            self._model, env, played, manifest, seed=options.seed, eval_items=options.eval_items
        )
        self._workload = measured.workload
        return measured.problems

    def _scripted_workload(self, manifest: JobManifest) -> Workload:
        plays = [play for play in self._plays.values() if play.policy == ORACLE]
        table = manifest.prime_rl
        tokens = sum(play.num_tokens for play in plays) / len(plays)
        sampled = sum(play.turn_tokens for play in plays) / len(plays)
        return Workload(
            tokens_per_rollout=min(tokens, table.seq_len),
            sampled_tokens_per_rollout=min(sampled, table.seq_len),
            turns_per_rollout=min(sum(p.num_turns for p in plays) / len(plays), table.max_turns),
            params=self._options.params.get(manifest.base_model, 0),
            eval_items=self._options.eval_items,
        )

    def _check_budget(self) -> list[Problem]:
        """Small jobs only: what a large one costs depends on the rented machine."""
        assert self._workload is not None
        if self._options.bounds.scale != "small":
            return []
        caps = self._options.caps
        self._predicted = predict(
            self._known_manifest(),
            self._workload,
            usd_per_cpu_hour=caps.usd_per_cpu_hour,
            speed=self._options.speed,
        )
        return budget_problems(self._predicted, caps)


def _prompt_problems(rows: Sequence[Row]) -> list[Problem]:
    for row in rows:
        if not row.prompt.strip():
            return [_rows("empty", f"row {row.index} has an empty prompt", "text", "fill prompt")]
        if len(row.prompt) + len(row.system_prompt) > MAX_PROMPT_CHARS:
            wrong = f"row {row.index} has {len(row.prompt)} characters"
            return [_rows("too_long", wrong, f"at most {MAX_PROMPT_CHARS}", "shorten the prompt")]
        try:
            json.loads(row.data_json)
        except (ValueError, RecursionError):
            wrong = f"row {row.index} is not JSON"
            return [_rows("not_json", wrong, "plain values in Data", "use text, numbers, lists")]
        if len(row.data_json) > MAX_ROW_CHARS:
            wrong = f"row {row.index} is {len(row.data_json)} characters of JSON"
            return [_rows("too_large", wrong, f"at most {MAX_ROW_CHARS}", "store less in Data")]
    total = sum(len(row.data_json) for row in rows)
    if total > MAX_DATA_CHARS:
        wrong, expected = f"all rows are {total} characters", f"at most {MAX_DATA_CHARS}"
        return [_rows("too_large", wrong, expected, "yield fewer or smaller rows")]
    distinct = len({row.prompt for row in rows})
    if distinct < _MIN_DISTINCT:
        wrong = f"only {distinct} of {len(rows)} prompts differ"
        return [_rows("repeated", wrong, f"at least {_MIN_DISTINCT}", "draw rows from one rng")]
    return []


def _rows(code: str, wrong: str, expected: str, fix: str) -> Problem:
    return _problem("rows", code, wrong, expected, fix)


def _problem(stage: str, code: str, wrong: str, expected: str, fix: str) -> Problem:
    return Problem(stage=stage, code=f"{stage}.{code}", wrong=wrong, expected=expected, fix=fix)
