"""Jobs that are wrong in one way each, and the line that must say so; played in the real jail."""

from dataclasses import dataclass, field

import pytest

from nestling.jobs.budget import Caps
from nestling.jobs.bundle import Bundle
from nestling.jobs.probe import ProbeOptions, probe
from nestling.jobs.probe_env import JailedOpener
from nestling.jobs.template import EXACT_REWARD, TASKSET_PATH, starting_files, template_files

INIT = "environment/__init__.py"
FAMILY = "ledger"


@dataclass(frozen=True, kw_only=True)
class BrokenJob:
    name: str
    code: str
    line: str
    """How the first problem reads."""
    edits: tuple[tuple[str, str, str], ...] = ()
    """Path, old text, new text."""
    files: dict[str, str] = field(default_factory=dict)
    """Whole files to add or replace."""
    cap_cpu_s: float = 600.0

    def build(self) -> dict[str, bytes]:
        files = template_files(FAMILY)
        for path, old, new in self.edits:
            assert old in files[path], (self.name, old)
            files[path] = files[path].replace(old, new)
        return {path: text.encode() for path, text in (files | self.files).items()}


def reward(body: str, before: str = "") -> tuple[tuple[str, str, str], ...]:
    """The template with another body of its reward."""
    text = EXACT_REWARD.rpartition("        return")[0] + f"        {body}\n"
    return (
        (TASKSET_PATH, EXACT_REWARD, text),
        (TASKSET_PATH, "class TaskConfig", before + "class TaskConfig"),
    )


def taskset(old: str, new: str) -> tuple[tuple[str, str, str], ...]:
    return ((TASKSET_PATH, old, new),)


UNFILLED = starting_files(FAMILY)[TASKSET_PATH]
YIELD = "yield Task(sample(rng, LO, HI), self.config.task)"

BROKEN = [
    BrokenJob(
        name="schema",
        code="schema.out_of_bounds",
        line="[schema] lr 0.1 is out of bounds; expected 1e-5..3e-3; fix: for example lr = 1e-5",
        edits=(("job.toml", "lr = 0.0003", "lr = 0.1"),),
    ),
    BrokenJob(
        name="unfilled",
        code="static.gap",
        line="[static] environment/taskset.py line 6: RANGE is not filled in; expected lowest, highest difficulty; fix: replace RANGE by two numbers such as 2, 5",
        files={TASKSET_PATH: UNFILLED},
    ),
    BrokenJob(
        name="range",
        code="static.gap",
        line="[static] environment/taskset.py line 6: RANGE is not filled in; expected lowest, highest difficulty; fix: replace RANGE by two numbers such as 2, 5",
        edits=taskset("LO, HI = 2, 5", "LO, HI = RANGE"),
    ),
    BrokenJob(
        name="rewards",
        code="static.gap",
        line="[static] environment/taskset.py: # REWARDS is not filled in; expected a reward method; fix: replace it by an @vf.reward async def",
        edits=taskset(EXACT_REWARD, "    # REWARDS\n"),
    ),
    BrokenJob(
        name="syntax",
        code="static.syntax",
        line="[static] environment/taskset.py line 19: expected ':'; expected valid Python; fix: correct that line: async def correct(self, trace)",
        edits=taskset("async def correct(self, trace):", "async def correct(self, trace)"),
    ),
    BrokenJob(
        name="bracket",
        code="static.syntax",
        line="[static] environment/taskset.py line 20: '(' was never closed; expected valid Python; fix: correct that line: return float(parse_answer(trace.last_rep",
        edits=taskset("== self.data.answer)", "== self.data.answer"),
    ),
    BrokenJob(
        name="plain def",
        code="static.plain_reward",
        line="[static] environment/taskset.py line 19: reward correct is a plain def; expected async def; fix: write async def correct",
        edits=taskset("async def correct", "def correct"),
    ),
    BrokenJob(
        name="no reward",
        code="static.no_reward",
        line="[static] no @vf.reward method was found; expected at least one in class Task; fix: add @vf.reward() above an async def",
        edits=taskset("    @vf.reward(weight=1.0)\n", ""),
    ),
    BrokenJob(
        name="import",
        code="static.import",
        line="[static] environment/taskset.py line 1: import of os is refused; expected verifiers, tools or plain standard library; fix: remove it",
        edits=taskset("import random\n", "import os\nimport random\n"),
    ),
    BrokenJob(
        name="eval",
        code="static.name",
        line="[static] environment/taskset.py line 20: eval is refused; expected plain code; fix: do without it",
        edits=reward("return float(eval(trace.last_reply))"),
    ),
    BrokenJob(
        name="patch",
        code="static.patch",
        line="[static] environment/taskset.py line 9: random.random is overwritten; expected imported modules left as they are; fix: use a name of your own",
        edits=reward("return 1.0", "random.random = lambda: 0.5\n\n\n"),
    ),
    BrokenJob(
        name="dunder",
        code="static.dunder",
        line="[static] environment/taskset.py line 20: __mro__ is refused; expected plain code; fix: do without it",
        edits=reward("return float(len(trace.__class__.__mro__))"),
    ),
    BrokenJob(
        name="private",
        code="static.private",
        line="[static] environment/taskset.py line 20: random..._exit is refused; expected public names of allowed modules; fix: do without it",
        edits=reward("random._os._exit(3)"),
    ),
    BrokenJob(
        name="export",
        code="static.export",
        line='[static] environment/__init__.py has no __all__; expected __all__ = ["Taskset"]; fix: import your Taskset there and list its name',
        files={INIT: "from environment.taskset import Taskset\n"},
    ),
    BrokenJob(
        name="name",
        code="load.import",
        line="[load] ImportError: cannot import name 'parse_anser' from 'tools' at environment/taskset.py:4; expected a package that imports; fix: correct that line",
        edits=taskset("parse_answer, sample", "parse_anser, sample"),
    ),
    BrokenJob(
        name="exports two",
        code="load.import",
        line="[load] __all__ = [] names 0 Taskset classes; expected exactly one; fix: correct that line",
        files={INIT: "__all__ = []\n"},
    ),
    BrokenJob(
        name="env key",
        code="load.config",
        line="[load] [env]: num_row: Extra inputs are not permitted; expected [env] keys of your TasksetConfig; fix: correct [env] in job.toml",
        edits=(("job.toml", "temperature = 1.0\n", "temperature = 1.0\n\n[env]\nnum_row = 64\n"),),
    ),
    BrokenJob(
        name="load fails",
        code="rows.failed",
        line="[rows] row 0: ValueError: lo=5 is above hi=2; give sample(rng, lo, hi) with lo <= hi; expected load() to yield Task(row, self.config.task); fix: correct load()",
        edits=taskset("LO, HI = 2, 5", "LO, HI = 5, 2"),
    ),
    BrokenJob(
        name="few rows",
        code="rows.too_few",
        line="[rows] load() yields 3 rows; expected 16..4096; fix: yield more rows",
        edits=taskset("num_rows: int = 512", "num_rows: int = 3"),
    ),
    BrokenJob(
        name="many rows",
        code="rows.too_many",
        line="[rows] load() yields too many rows; expected at most 4096; fix: stop",
        edits=taskset("num_rows: int = 512", "num_rows: int = 5000"),
    ),
    BrokenJob(
        name="same rows",
        code="rows.repeated",
        line="[rows] only 1 of 512 prompts differ; expected at least 8; fix: draw rows from one rng",
        edits=taskset(YIELD, "yield Task(sample(random.Random(0), LO, HI), self.config.task)"),
    ),
    BrokenJob(
        name="empty prompt",
        code="rows.empty",
        line="[rows] row 0 has an empty prompt; expected text; fix: fill prompt",
        edits=taskset(
            YIELD,
            'yield Task(sample(rng, LO, HI).model_copy(update={"prompt": " "}), self.config.task)',
        ),
    ),
    BrokenJob(
        name="large row",
        code="rows.too_large",
        line="[rows] row 0 is 40899 characters of JSON; expected at most 32000; fix: store less in Data",
        edits=taskset(
            YIELD,
            'yield Task(sample(rng, LO, HI).model_copy(update={"name": "x" * 40000}), self.config.task)',
        ),
    ),
    BrokenJob(
        name="labels",
        code="rows.wrong_answer",
        line="[rows] row 0 says answer 77, its tools lead to 42; expected the true answer; fix: keep the answer of sample()",
        edits=taskset(
            YIELD,
            'yield Task(sample(rng, LO, HI).model_copy(update={"answer": "77"}), self.config.task)',
        ),
    ),
    BrokenJob(
        name="not a task",
        code="rows.failed",
        line="[rows] row 0: AttributeError: 'Data' object has no attribute 'with_data'; expected load() to yield Task(row, self.config.task); fix: correct load()",
        edits=taskset(YIELD, "yield sample(rng, LO, HI)"),
    ),
    BrokenJob(
        name="state",
        code="rows.state",
        line="[rows] Tools uses State and Task uses Other; expected the same one; fix: class Task(vf.Task[Data, State, TaskConfig])",
        edits=taskset(
            "class Task(vf.Task[Data, State, TaskConfig])",
            "class Other(State):\n    pass\n\n\nclass Task(vf.Task[Data, Other, TaskConfig])",
        ),
    ),
    BrokenJob(
        name="no tools",
        code="tools.none",
        line="[tools] the task has no tools; expected the family's tools; fix: return [Tools(config.tools)] from Task.toolsets",
        edits=taskset("return [Tools(config.tools)]", "return []"),
    ),
    BrokenJob(
        name="turns",
        code="tools.max_turns",
        line="[tools] rows need 6 turns or more, max_turns is 2; expected rows that can be solved; fix: raise max_turns to 7 or lower the difficulty",
        edits=(("job.toml", "temperature = 1.0", "max_turns = 2"),),
    ),
    BrokenJob(
        name="constant",
        code="rubric.constant",
        line="[rubric] every rollout gets reward 1; expected right and wrong answers to differ; fix: compare with self.data.answer",
        edits=reward("return 1.0"),
    ),
    BrokenJob(
        name="nan",
        code="rubric.error",
        line="[rubric] scoring failed: ValueError: reward correct is nan; expected a number; fix: correct the reward",
        edits=reward('return float("nan")'),
    ),
    BrokenJob(
        name="bool",
        code="rubric.error",
        line="[rubric] scoring failed: TypeError: reward correct returned a bool; expected a number; fix: correct the reward",
        edits=reward("return trace.last_reply != self.data.answer"),
    ),
    BrokenJob(
        name="unknown name",
        code="rubric.error",
        line="[rubric] scoring failed: NameError: name 'answer' is not defined; expected a number; fix: correct the reward",
        edits=reward("return float(parse_answer(trace.last_reply) == answer)"),
    ),
    BrokenJob(
        name="range of reward",
        code="rubric.range",
        line="[rubric] a reward is 100; expected -10..10; fix: scale it down",
        edits=reward("return 100.0 * (parse_answer(trace.last_reply) == self.data.answer)"),
    ),
    BrokenJob(
        name="format",
        code="rubric.oracle",
        line="[rubric] the correct answer does not beat the rest: 1.00, a wrong answer 1.00; expected it to earn most; fix: reward equality with self.data.answer",
        edits=reward("return float(parse_answer(trace.last_reply) is not None)"),
    ),
    BrokenJob(
        name="calls",
        code="rubric.oracle",
        line="[rubric] the correct answer does not beat the rest: 0.56, many tool calls 1.00; expected it to earn most; fix: reward equality with self.data.answer",
        edits=reward("return min(trace.state.calls, 10) / 10"),
    ),
    BrokenJob(
        name="mostly calls",
        code="rubric.oracle",
        line="[rubric] the correct answer does not beat the rest: 0.55, many tool calls 0.80; expected it to earn most; fix: reward equality with self.data.answer",
        edits=reward(
            "return 0.1 * (parse_answer(trace.last_reply) == self.data.answer) + 0.8 * min(trace.state.calls, 10) / 10"
        ),
    ),
    BrokenJob(
        name="length",
        code="rubric.oracle",
        line="[rubric] the correct answer does not beat the rest: 0.10, a copy of the prompt 1.49; expected it to earn most; fix: reward equality with self.data.answer",
        edits=reward("return len(trace.last_reply) / 100"),
    ),
    BrokenJob(
        name="inverted",
        code="rubric.oracle",
        line="[rubric] the correct answer does not beat the rest: 0.00, a wrong answer 1.00; expected it to earn most; fix: reward equality with self.data.answer",
        edits=reward("return float(parse_answer(trace.last_reply) != self.data.answer)"),
    ),
    BrokenJob(
        name="tools_that_count",
        code="rubric.replies",
        line="[rubric] the same tool calls got other answers in another order; expected tools that depend on their own rollout alone; fix: keep no state outside trace.state",
        edits=(
            (TASKSET_PATH, "[Tools(config.tools)]", "[Counting(config.tools)]"),
            (
                TASKSET_PATH,
                "class TaskConfig",
                "SEEN = []\n\n\nclass Counting(Tools):\n    def use(self, tool, **given):\n"
                "        SEEN.append(tool)\n"
                "        return super().use(tool, **given) + ' ' * len(SEEN)\n\n\nclass TaskConfig",
            ),
        ),
    ),
    BrokenJob(
        name="order",
        code="rubric.order",
        line="[rubric] the same rollouts got other rewards in another order; expected a reward that depends on its own rollout alone; fix: keep no state outside trace.state",
        edits=reward(
            "SEEN.append(1)\n        return float(parse_answer(trace.last_reply) == self.data.answer) + len(SEEN) % 7 / 70",
            "SEEN = []\n\n\n",
        ),
    ),
    BrokenJob(
        name="exit",
        code="rubric.exited",
        line="[rubric] SystemExit: 3; expected code that does not end the process; fix: remove exits, use less memory",
        edits=reward('getattr(pathlib, "sys").exit(3)', "import pathlib\n\n\n"),
    ),
    BrokenJob(
        name="money",
        code="budget.cpu_s",
        line="[budget] the job would cost about 45 CPU-seconds; expected at most 5; fix: lower max_steps or batch_size",
        cap_cpu_s=5.0,
    ),
]


@pytest.fixture(scope="module")
def opener(jail, zygote):
    return JailedOpener(jail=jail, starter=zygote)


@pytest.mark.long
@pytest.mark.parametrize("job", BROKEN, ids=lambda job: job.name)
def test_each_broken_job_has_its_own_line(job, opener):
    options = ProbeOptions(caps=Caps(cpu_s=job.cap_cpu_s))
    report = probe(Bundle.from_files(job.build()), FAMILY, env_opener=opener, options=options)
    assert not report.ok
    assert report.problems[0].code == job.code
    assert report.problems[0].line() == job.line
    assert all(len(line) <= 160 for line in report.lines())
    assert all(len(problem.line()) <= 160 for problem in report.problems)
    assert report.stages[-1].name == report.problems[0].stage


def test_lines_are_distinct():
    assert len({job.line for job in BROKEN}) >= len(BROKEN) - 6
    assert len(BROKEN) >= 30
