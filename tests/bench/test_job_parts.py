"""Benchmarks of plumbing, probe and job measure what they say, on the smallest work there is."""

from __future__ import annotations

import time

import pytest

from nestling.bench import job, plumbing, probe
from nestling.bench.cpu_clock import CpuClock, below_cpu_s, timed
from nestling.config import InnerConfig, RunConfig
from nestling.core.errors import ConfigError


class Worker:
    """Burns processor time, once on its own and once through the other method."""

    def burn(self) -> float:
        started_s = time.process_time()
        while time.process_time() - started_s < 0.02:
            pass
        return time.process_time() - started_s

    def twice(self) -> float:
        return self.burn() + self.burn()


def test_time_in_methods_counts_nested_calls_once_and_leaves_no_trace() -> None:
    before = Worker.burn
    with timed(Worker, "burn", "twice") as spent_s:
        burnt_s = Worker().twice()
        inside_s = spent_s()
    assert burnt_s <= inside_s < 2 * burnt_s
    assert Worker.burn is before
    Worker().burn()
    assert spent_s() == inside_s


def test_a_clock_counts_this_process_and_those_below() -> None:
    clock = CpuClock()
    Worker().burn()
    own_s = clock.own_s()
    assert own_s >= 0.02
    assert clock.total_s() >= own_s
    assert below_cpu_s() >= 0.0


@pytest.mark.parametrize("measure", [plumbing.measure, probe.measure, job.measure])
def test_no_runs(measure) -> None:
    with pytest.raises(ConfigError, match="runs=0"):
        measure(runs=0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rollout_is_measured_beside_the_lifecycle() -> None:
    found = plumbing.measure(families=["calc_chain"], sizes=[8], runs=1, lifecycle_rollouts=2)
    (row,) = found.runs
    assert row["ms"] == pytest.approx(row["worker_ms"] + row["pipe_ms"], rel=0.2)
    assert 0 < row["ratio"] < 1
    assert found.figures["rollout_cpu_ms_max"] == {8: row["ms"]}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_probe_and_a_job_are_measured_by_part(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("NESTLING_STATE", str(tmp_path))
    config = RunConfig(inner=InnerConfig(eval_items=8, leak_items=8))
    probed = probe.measure(config, families=["calc_chain"], runs=1)
    assert probed.figures["probe_cpu_s_p50"] > 0
    assert set(probed.runs[0]["stage_s"]) >= {"load", "rows", "rubric"}
    trained = job.measure(config, families=["calc_chain"], runs=1)
    (row,) = trained.runs
    assert sum(row[part] for part in job.PARTS) == pytest.approx(row["cpu_s"], rel=0.05)
    assert all(row[part] > 0 for part in job.PARTS)
