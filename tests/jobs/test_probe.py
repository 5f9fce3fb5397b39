import json
import random

import pytest

from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError, JailError, Problem
from nestling.families.registry import ALL, get
from nestling.families.splits import EvalSecret, hidden_items
from nestling.jobs.budget import Caps, CoreSpeed, Workload, budget_problems, predict
from nestling.jobs.bundle import Bundle
from nestling.jobs.jail import JailLimits
from nestling.jobs.leaks import LeakIndex
from nestling.jobs.manifest import JobManifest
from nestling.jobs.probe import ProbeOptions, probe
from nestling.jobs.probe_env import JailedOpener
from nestling.jobs.probe_faults import fault_problem
from nestling.jobs.probe_policies import ORACLE, POLICIES, lesson_of, most_common_answer
from nestling.jobs.probe_report import STAGES, ProbeReport
from nestling.jobs.rollout_env import Row
from nestling.jobs.template import EXACT_REWARD, TASKSET_PATH, template_files, template_job

ROWS = "num_rows: int = 512"


@pytest.fixture(scope="module")
def opener(jail, zygote):
    return JailedOpener(jail=jail, starter=zygote)


def job(family="ledger", *edits, **files):
    texts = template_files(family)
    texts[TASKSET_PATH] = texts[TASKSET_PATH].replace(ROWS, "num_rows: int = 48")
    for old, new in edits:
        assert old in texts[TASKSET_PATH]
        texts[TASKSET_PATH] = texts[TASKSET_PATH].replace(old, new)
    texts |= files
    return Bundle.from_files({path: text.encode() for path, text in texts.items()})


def with_reward(*bodies):
    methods = "\n".join(
        f"    @vf.reward(weight={weight})\n    async def r{i}(self, trace):\n        {body}\n"
        for i, (weight, body) in enumerate(bodies)
    )
    return (EXACT_REWARD, methods)


CORRECT = "return float(parse_answer(trace.last_reply) == self.data.answer)"


@pytest.mark.parametrize("family", ALL)
def test_every_template_job_passes(family, opener):
    report = probe(template_job(family), family, env_opener=opener)
    assert report.lines() == []
    assert report.ok
    assert [stage.name for stage in report.stages] == list(STAGES)
    assert report.predicted is not None
    assert 5 < report.predicted.cpu_s < 120
    assert ProbeReport.model_validate_json(report.model_dump_json()) == report


@pytest.mark.parametrize(
    "rewards",
    [
        pytest.param([(1.0, "return float(self.data.answer in trace.last_reply)")], id="lenient"),
        pytest.param([(1.0, CORRECT), (1.0, "return -0.1 * trace.state.calls")], id="brief"),
        pytest.param(
            [
                (1.0, CORRECT),
                (0.2, "return float(parse_answer(trace.last_reply) is not None)"),
                (0.1, "return max(0.0, 1.0 - abs(trace.state.calls - self.data.num_calls))"),
            ],
            id="shaped",
        ),
        pytest.param(
            [(0.1, CORRECT), (0.8, "return float(parse_answer(trace.last_reply) is not None)")],
            id="mostly format",
        ),
    ],
)
@pytest.mark.parametrize("family", ["ledger", "multi_hop"])
def test_rubrics_that_still_prefer_the_right_answer_pass(family, rewards, opener):
    report = probe(job(family, with_reward(*rewards)), family, env_opener=opener)
    assert report.lines() == []


def test_rows_of_another_making_are_answered_with_their_own_answer(opener):
    own = (
        "yield Task(sample(rng, LO, HI), self.config.task)",
        'a = rng.randint(1, 99)\n            yield Task(Data(prompt=f"Say {a}.", answer=str(a)),'
        " self.config.task)",
    )
    assert probe(job("ledger", own), "ledger", env_opener=opener).lines() == []
    bad = with_reward((1.0, "return float(parse_answer(trace.last_reply) is not None)"))
    report = probe(job("ledger", own, bad), "ledger", env_opener=opener)
    assert report.problems[0].code == "rubric.oracle"


def test_rows_that_all_have_one_answer_teach_nothing(opener):
    own = (
        "yield Task(sample(rng, LO, HI), self.config.task)",
        'yield Task(Data(prompt=f"Say 7 ({rng.random()}).", answer="7"), self.config.task)',
    )
    report = probe(job("ledger", own), "ledger", env_opener=opener)
    assert "always the same answer 1.00" in report.lines()[0]


@pytest.fixture(scope="module")
def hidden():
    return hidden_items("ledger", "b", 200, EvalSecret(bytes(range(32))))


@pytest.fixture(scope="module")
def leaks(hidden):
    return LeakIndex.build(get("ledger"), {"b": hidden}, honest_rows=1000)


def test_an_honest_job_passes_the_leak_scan(opener, leaks):
    options = ProbeOptions(leaks=leaks)
    report = probe(template_job("ledger"), "ledger", env_opener=opener, options=options)
    assert report.lines() == []


def test_hidden_items_in_a_data_file_are_refused(opener, leaks, hidden):
    text = "\n".join(item.prompt for item in hidden[:20])
    report = probe(
        job("ledger", **{"data/rows.txt": text}),
        "ledger",
        env_opener=opener,
        options=ProbeOptions(leaks=leaks),
    )
    assert report.problems[0].code == "rows.leak_exact"
    assert report.lines() == [
        "[rows] data/rows.txt holds an eval item (word for word; 20 in all); "
        "expected no items of the hidden eval; fix: draw rows with sample()"
    ]


def test_a_changed_bundle_is_refused_before_anything_runs(opener):
    bundle = template_job("ledger")
    forged = Bundle(dict(bundle.files) | {"data/x.txt": b"x"}, bundle.job_hash)
    report = probe(forged, "ledger", env_opener=opener)
    assert report.problems[0].code == "files.hash"
    assert [stage.name for stage in report.stages] == ["files"]


def test_unknown_family_is_the_callers_error(opener):
    with pytest.raises(ConfigError, match="unknown family"):
        probe(template_job("ledger"), "ledgre", env_opener=opener)


@pytest.mark.long
def test_an_environment_that_hangs_is_a_problem_not_a_hang(jail, zygote):
    limits = JailLimits(cpu_s=20, load_s=20, call_s=1.0)
    opener = JailedOpener(jail=jail, starter=zygote, limits=limits)
    endless = (
        "rng = random.Random(self.config.seed)",
        "while True:\n            pass\n        rng = 0",
    )
    report = probe(job("ledger", endless), "ledger", env_opener=opener)
    assert report.problems[0].code == "rows.deadline"
    assert "remove endless loops" in report.lines()[0]


def test_every_policy_but_the_oracle_is_wrong_by_the_familys_own_grader():
    rng = random.Random(3)
    for name in ALL:
        family = get(name)
        lo, hi = family.eval_range
        for index in range(5):
            item = family.sample(rng, max(lo, 2), hi)
            row = Row(
                index=index,
                system_prompt=item.system_prompt,
                prompt=item.prompt,
                data_json=json.dumps(item.to_dict()),
            )
            lesson = lesson_of(row, family, (), "0", seed=index)
            assert lesson.found == item.answer
            assert len(lesson.solution) == item.num_calls
            grades = {}
            for policy, script in POLICIES.items():
                state, play = family.start(item), script(lesson)
                try:
                    tool, arguments, _ = next(play)
                    while True:
                        reply = family.call(item, state, tool, arguments)
                        tool, arguments, _ = play.send(reply)
                except StopIteration as stop:
                    grades[policy] = family.grade(item, stop.value)
            assert grades.pop(ORACLE) == 1.0
            assert sum(grades.values()) <= 1  # a chance hit of the copy or the random policy


def test_a_world_that_is_nonsense_is_treated_as_a_custom_row():
    worlds = [{"opening": 3}, {"people": {}, "first": "x", "relations": [[1]]}, {"a": [[[]]]}]
    for name in ALL:
        for world in worlds:
            data = {"answer": "1", "num_calls": 2, "world": world}
            row = Row(index=0, system_prompt="", prompt="p", data_json=json.dumps(data))
            lesson = lesson_of(row, get(name), (), "0", seed=0)
            assert lesson.found is None
            assert lesson.answer == "1"
            assert lesson.solution == ()


def test_most_common_answer_skips_rows_without_one():
    rows = [
        Row(index=i, system_prompt="", prompt="p", data_json=text)
        for i, text in enumerate(
            ['{"answer": "4"}', "[]", '{"answer": 4}', '{"answer": "5"}', "{}"]
        )
    ]
    assert most_common_answer(rows) == "4"
    assert most_common_answer(rows[1:2]) == "0"


def test_prediction_grows_with_rollouts_tokens_and_size():
    def cost(params=1_600_000, tokens=130.0, **settings):
        work = Workload(
            tokens_per_rollout=tokens,
            sampled_tokens_per_rollout=tokens / 2,
            turns_per_rollout=5,
            params=params,
        )
        manifest = JobManifest.build("micro", **settings)
        return predict(manifest, work, usd_per_cpu_hour=0.05, speed=CoreSpeed()).cpu_s

    base = cost(max_steps=10)
    assert cost(max_steps=16) > base > cost(max_steps=5)
    assert cost(max_steps=10, tokens=260.0) > base
    assert cost(max_steps=10, params=350_000) < base


def test_caps_are_on_time_and_money():
    work = Workload(
        tokens_per_rollout=100, sampled_tokens_per_rollout=50, turns_per_rollout=5, params=10**6
    )
    predicted = predict(JobManifest.build("micro"), work, usd_per_cpu_hour=1.0)
    assert budget_problems(predicted, Caps()) == []
    assert [p.code for p in budget_problems(predicted, Caps(usd=0.0001, cpu_s=1.0))] == [
        "budget.cpu_s",
        "budget.usd",
    ]


@pytest.mark.parametrize("reason", ["env.import", "env.deadline", "import", "jail.start", "x.y"])
def test_every_fault_becomes_a_short_problem_of_its_stage(reason):
    problem = fault_problem("load", JailError(reason, "long " * 200))
    assert isinstance(problem, Problem)
    assert problem.stage == "load"
    assert len(problem.line()) <= 180
    assert problem.code.startswith("load.")


def test_stages_are_timed_by_the_given_clock(opener):
    class Ticking(SystemClock):
        def __init__(self):
            self.ticks = 0.0

        def monotonic(self):
            self.ticks += 1.0
            return self.ticks

    options = ProbeOptions(clock=Ticking())
    unfilled = job("ledger", (EXACT_REWARD, "    # REWARDS\n"))
    report = probe(unfilled, "ledger", env_opener=opener, options=options)
    assert [stage.seconds for stage in report.stages] == [1.0, 1.0, 1.0]
