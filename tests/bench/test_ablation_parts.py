"""A job with one part of another."""

import random

import pytest

from nestling.agent.rubrics import RUBRICS, render_rubric
from nestling.bench.ablation.parts import PARTS, Part, with_part
from nestling.core.errors import JobRejectedError
from nestling.families.registry import ALL
from nestling.inner.spread import with_settings
from nestling.jobs.bundle import Bundle
from nestling.jobs.template import EXACT_REWARD, TASKSET_PATH, template_job

TEMPLATE = template_job("ledger")
LENIENT = render_rubric(RUBRICS["lenient"], random.Random(0))
MOSTLY_FORM = render_rubric(RUBRICS["mostly_format"], random.Random(0))


def edited(job: Bundle, *edits: tuple[str, str], **files: str) -> Bundle:
    text = job.files[TASKSET_PATH].decode()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    added = {path: data.encode() for path, data in files.items()}
    return Bundle.from_files({**job.files, TASKSET_PATH: text.encode(), **added})


def code(job: Bundle) -> str:
    return job.files[TASKSET_PATH].decode()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("family", ALL)
def test_a_job_that_agrees_is_left_as_it_is(family: str, part: Part) -> None:
    template = template_job(family)
    noted = edited(template, ("class Task(", "# my own remark\nclass Task("))
    assert noted != template
    assert with_part(noted, template, part) is noted


def test_defaults_and_written_values_agree() -> None:
    written = with_settings(TEMPLATE, weight_decay=TEMPLATE.manifest().prime_rl.weight_decay)
    assert written.job_hash != TEMPLATE.job_hash
    assert with_part(written, TEMPLATE, "config") is written


def test_base_and_config_are_swapped_alone() -> None:
    job = edited(with_settings(TEMPLATE, base_model="nano", lr=1e-5), ("2, 5", "1, 1"))
    base, config = with_part(job, TEMPLATE, "base"), with_part(job, TEMPLATE, "config")
    assert (base.manifest().base_model, base.manifest().prime_rl.lr) == ("micro", 1e-5)
    assert (config.manifest().base_model, config.manifest().prime_rl.lr) == ("nano", 3e-4)
    assert config.manifest().prime_rl == TEMPLATE.manifest().prime_rl
    for one in (base, config):
        assert code(one) == code(job)


@pytest.mark.parametrize("family", ALL)
def test_rubric_and_data_are_taken_apart(family: str) -> None:
    template = template_job(family)
    lo, hi = map(int, code(template).split("LO, HI = ")[1].split("\n")[0].split(","))
    job = edited(
        with_settings(template, lr=1e-5), (f"{lo}, {hi}", "1, 7"), (EXACT_REWARD, MOSTLY_FORM)
    )
    rubric, data = with_part(job, template, "rubric"), with_part(job, template, "data")
    assert "1, 7" in code(rubric)
    assert "well_formed" not in code(rubric)
    assert code(rubric).count("@vf.reward") == 1
    assert f"{lo}, {hi}" in code(data)
    assert code(data).count("@vf.reward") == 2
    for one in (rubric, data):
        assert one.manifest() == job.manifest()
        compile(code(one), TASKSET_PATH, "exec")
    assert with_part(rubric, template, "rubric") is rubric
    assert with_part(data, template, "data") is data
    # Both ways round give the same job, up to its settings.
    both = with_part(with_part(job, template, "data"), template, "rubric")
    assert with_part(both, template, "rubric") is both
    assert with_part(both, template, "data") is both


def test_all_is_the_whole_template() -> None:
    job = with_settings(TEMPLATE, lr=1e-5)
    assert with_part(job, TEMPLATE, "all") == TEMPLATE


def test_environment_arguments_and_files_belong_to_the_data() -> None:
    toml = TEMPLATE.files["job.toml"].decode() + "\n[env]\nnum_rows = 32\n"
    job = edited(TEMPLATE, **{"job.toml": toml, "data/rows.jsonl": "{}\n"})
    data = with_part(job, TEMPLATE, "data")
    assert (data.manifest().env, set(data.files)) == ({}, set(TEMPLATE.files))
    rubric = with_part(edited(job, (EXACT_REWARD, LENIENT)), TEMPLATE, "rubric")
    assert rubric.manifest().env == {"num_rows": 32}
    assert "data/rows.jsonl" in rubric.files


def test_what_a_rubric_uses_moves_with_it() -> None:
    own = (
        "    def near(self, text):\n        return close(text) * WEIGHT\n\n"
        "    @vf.reward(weight=WEIGHT)\n"
        '    async def correct(self, trace):\n        """Say why.\n\n        At length."""\n'
        "        return self.near(trace.last_reply)\n"
    )
    job = edited(
        TEMPLATE,
        (EXACT_REWARD, own),
        ("2, 5", "1, 2"),
        ("class TaskConfig(", "WEIGHT = 0.5\n\n\ndef close(text):\n"
         "    return float(text == 'x') if math.pi else 0.0\n\n\nclass TaskConfig("),
        ("import random\n", "import math\nimport random\n"),
    )  # fmt: skip
    data = with_part(job, TEMPLATE, "data")
    for text in ("2, 5", "WEIGHT = 0.5", "def close(", "import math", "def near("):
        assert text in code(data)
    assert with_part(data, TEMPLATE, "data") is data, "only its range was another"
    rubric = with_part(job, TEMPLATE, "rubric")
    assert "parse_answer(" in code(rubric)
    assert "near" not in code(rubric)
    assert with_part(rubric, TEMPLATE, "rubric") is rubric
    assert (
        with_part(edited(job, ("1, 2", "2, 5")), TEMPLATE, "data").files
        == edited(job, ("1, 2", "2, 5")).files
    )


def test_a_rubric_indented_otherwise_and_its_own_import_of_reward() -> None:
    odd = code(TEMPLATE).replace("    ", "\t").replace("@vf.reward(weight=1.0)", "@reward()")
    odd = odd.replace("import random\n", "import random\n\nfrom verifiers.v1 import reward\n")
    job = Bundle.from_files({**TEMPLATE.files, TASKSET_PATH: odd.encode()})
    data = with_part(edited(job, ("2, 5", "3, 4")), TEMPLATE, "data")
    assert "from verifiers.v1 import reward" in code(data)
    compile(code(data), TASKSET_PATH, "exec")
    rubric = with_part(job, TEMPLATE, "rubric")
    assert "\t@vf.reward(weight=1.0)" in code(rubric)
    compile(code(rubric), TASKSET_PATH, "exec")


def test_lines_are_counted_as_python_counts_them() -> None:
    job = edited(TEMPLATE, ("import random\n", 'import random\n\nNOTE = "a\u2028b\x0cc"\n'))
    job = edited(job, (EXACT_REWARD, LENIENT))
    windows = code(job).replace("\n", "\r\n").encode()
    for text in (job.files[TASKSET_PATH], windows):
        one = Bundle.from_files({**job.files, TASKSET_PATH: text})
        rubric = with_part(one, TEMPLATE, "rubric")
        assert "a\u2028b\x0cc" in code(rubric)
        assert "in trace.last_reply" not in code(rubric)
        compile(code(rubric), TASKSET_PATH, "exec")


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ([(EXACT_REWARD, EXACT_REWARD.replace("== self.data.answer)", "== self.data.answer) * LO"))],
         "by LO"),
        ([("class TasksetConfig(", "class Other:\n" + EXACT_REWARD + "\n\nclass TasksetConfig(")],
         "Task, environment/taskset.py:Other"),
        ([(EXACT_REWARD, EXACT_REWARD.replace("parse_answer(", "Task.x or parse_answer("))],
         "own class Task"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_apart_is_said(edits: list[tuple[str, str]], message: str) -> None:
    job = edited(edited(TEMPLATE, ("2, 5", "1, 1")), *edits)
    with pytest.raises(JobRejectedError, match=message) as raised:
        with_part(job, TEMPLATE, "data")
    assert raised.value.problems[0].code == "ablation.inseparable"
    assert with_part(job, TEMPLATE, "all") == TEMPLATE
