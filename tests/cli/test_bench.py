import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from nestling.bench.record import Measured, record
from nestling.bench.registry import BENCHMARKS, measure_of
from nestling.bench.spread import JOBS, summarise, with_bad_rubric
from nestling.core.clock import SystemClock
from nestling.families.registry import ALL
from nestling.inner.spread import SpreadRow
from nestling.jobs.template import TASKSET_PATH, template_job

from .conftest import START, Run


def row(family: str, job: str, uplift: float | None) -> SpreadRow:
    return SpreadRow(
        family=family,
        job=job,
        base_model="micro",
        seeds=(0,),
        n=8,
        uplifts=() if uplift is None else (uplift,),
        uplift_mean=uplift,
        uplift_ci=None if uplift is None else (uplift - 0.1, uplift + 0.1),
        post_mean=None,
        best_pre=0.2,
        cpu_s_mean=10.0,
        wall_s_mean=10.0,
        failures=() if uplift is not None else ("train.diverged",),
    )


def test_summary_names_every_job_that_is_not_below_the_template() -> None:
    figures = summarise(
        [
            row("ledger", "template", 0.3),
            row("ledger", "lr_too_high", None),
            row("ledger", "noop", 0.0),
            row("dispatch", "template", 0.2),
            row("dispatch", "lr_too_high", 0.25),
            row("dispatch", "noop", 0.0),
        ]
    )
    assert figures["template"]["uplift_min"] == 0.2
    assert figures["template"]["uplift_lo_min"] == pytest.approx(0.1)
    assert figures["not_below_template"] == ["dispatch/lr_too_high"]
    jobs = figures["uplift_by_job"]
    assert jobs["template"]["uplift_mean"] == pytest.approx(0.25)
    lo, hi = jobs["template"]["uplift_ci"]
    assert -1 <= lo < 0.25 < hi <= 1
    assert (jobs["lr_too_high"]["families"], jobs["lr_too_high"]["failures"]) == (1, 1)
    assert jobs["lr_too_high"]["uplift_ci"] is None


def test_a_template_that_fails_has_no_figure() -> None:
    figures = summarise([row("ledger", "template", 0.3), row("dispatch", "template", None)])
    assert figures["template"]["uplift_min"] is None


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("job", ["mostly_format", "format_only"])
def test_bad_rubric_is_the_template_with_another_reward(family: str, job: str) -> None:
    template, bad = template_job(family), with_bad_rubric(family, job)
    changed = {path for path in template.files if template.files[path] != bad.files[path]}
    assert changed == {TASKSET_PATH}
    compile(bad.files[TASKSET_PATH], TASKSET_PATH, "exec")
    assert b"well_formed" in bad.files[TASKSET_PATH]
    assert (b"correct" in bad.files[TASKSET_PATH]) is (job == "mostly_format")


def test_registry_names_modules_that_measure() -> None:
    for name in BENCHMARKS:
        assert callable(measure_of(name))
    with pytest.raises(KeyError):
        measure_of("nothing")


def test_record_says_where_the_figures_are_from() -> None:
    measured = Measured(runs=({"s": 1.0},), figures={"s": 1.0}, columns=("s",), rows=(("1",),))
    made = record("x", measured, command="nestling bench x", wall_s=1.0, clock=SystemClock())
    assert made.machine["cores"] >= 1
    assert made.versions["nestling"]
    assert "rows" not in made.model_dump(), "the table is for people"


def test_unknown_reference_job_is_a_usage_error(here: Run, tmp_path: Path) -> None:
    done = here("bench", "spread", "--jobs", "templat", "--out", str(tmp_path / "x.json"))
    assert done.code == 2
    assert all(name in done.err for name in JOBS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interruption_ends_all_workers(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    with subprocess.Popen(
        [
            *START, "bench", "spread", "--families", "ledger,dispatch", "--items", "8",
            "--workers", "2", "--jobs", "template", "--out", str(out),
        ],
        start_new_session=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:  # fmt: skip
        until = time.monotonic() + 120
        children: list[psutil.Process] = []
        while len(children) <= 4 and time.monotonic() < until:
            time.sleep(0.5)
            children = psutil.Process(running.pid).children(recursive=True)
        assert len(children) > 4, "two workers, each with a scorer and a jail"
        running.send_signal(signal.SIGINT)
        assert running.wait(120) == 130, running.stderr.read()
    _, alive = psutil.wait_procs(children, timeout=60)
    # A killed worker's child may wait for the machine's first process to collect it.
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []
    assert not out.exists()
