from pathlib import Path

import pytest

from nestling.families.registry import ALL
from nestling.jobs.bundle import freeze
from nestling.jobs.template import (
    EXACT_REWARD,
    RANGE_GAP,
    REWARDS_GAP,
    TASKSET_PATH,
    starting_files,
    template_files,
    template_job,
)

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("family", ALL)
def test_each_gap_occurs_once_and_filling_both_gives_the_template_job(family):
    taskset = starting_files(family)[TASKSET_PATH]
    assert taskset.count(RANGE_GAP) == 1
    assert taskset.count(REWARDS_GAP) == 1
    filled = template_files(family)[TASKSET_PATH]
    span = filled.split("LO, HI = ")[1].split("\n")[0]
    assert taskset.replace(RANGE_GAP, span).replace(REWARDS_GAP, EXACT_REWARD) == filled


@pytest.mark.parametrize("family", ALL)
def test_examples_hold_the_template_job(family):
    assert freeze(EXAMPLES / family) == template_job(family)
    on_disk = {
        str(path.relative_to(EXAMPLES / family)) for path in (EXAMPLES / family).rglob("*.*")
    }
    assert on_disk == set(template_files(family))


@pytest.mark.parametrize("family", ALL)
def test_the_same_taskset_serves_every_family(family):
    assert starting_files(family)[TASKSET_PATH] == starting_files(ALL[0])[TASKSET_PATH]
    assert template_job(family).manifest().prime_rl.batch_size == 64
