"""A policy's accepted jobs out of a real run store."""

from collections import Counter
from pathlib import Path

import pytest

from nestling.bench.ablation.accepted import accepted_jobs
from nestling.core.errors import ConfigError, StoreError
from nestling.report.gather import gather

from .conftest import measure_only, play_run


@pytest.mark.long
async def test_jobs_of_the_last_steps_and_of_an_arm(tmp_path: Path) -> None:
    await play_run(tmp_path, steps=3, planned=3, text="", measured=True)
    rows = {row.id: row for row in gather(tmp_path).episodes}
    found = accepted_jobs(tmp_path, last=2, per_family=3, seed=1)
    assert found == accepted_jobs(tmp_path, last=2, per_family=3, seed=1)
    assert found.whose == f"training steps {_last_two(rows)}"
    assert max(Counter(job.family for job in found.jobs).values()) <= 3
    assert len(found.jobs) + found.not_kept == 6
    for job in found.jobs:
        row = rows[job.episode_id]
        assert (row.family, row.valid_attempt, row.job_hash, row.group_id) == (
            job.family, job.valid_attempt, job.bundle.job_hash, job.task,
        )  # fmt: skip
    other = accepted_jobs(tmp_path, last=2, per_family=3, seed=2)
    assert [job.episode_id for job in other.jobs] != [job.episode_id for job in found.jobs]

    arm = accepted_jobs(tmp_path, arm="template", per_family=100)
    assert {rows[job.episode_id].arm for job in arm.jobs} == {"template"}
    assert len({job.task for job in arm.jobs}) == len(arm.jobs), "every episode has its own task"
    assert arm.num_episodes == 36
    assert arm.num_accepted == len(arm.jobs) + arm.not_kept
    with pytest.raises(ConfigError, match=r"expected one of .*template"):
        accepted_jobs(tmp_path, arm="templat")


def _last_two(rows: dict) -> str:
    steps = sorted({row.step for row in rows.values() if row.purpose == "train"})
    return f"{steps[-2]} to {steps[-1]}"


async def test_a_record_without_training_wants_an_arm(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="run"):
        accepted_jobs(tmp_path)
    await measure_only(tmp_path)
    with pytest.raises(ConfigError, match="give --arm, one of noop, template"):
        accepted_jobs(tmp_path)
    with pytest.raises(ConfigError, match="no accepted job whose files were kept"):
        accepted_jobs(tmp_path, arm="template")
