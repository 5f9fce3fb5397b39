"""The whole product on real input: agent, probe, jail, training, scoring, update, report."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from nestling.outer.store_log import checkpoints, step_reports
from nestling.store.run_store import RunStore


@pytest.mark.timeout(300)
def test_one_step_of_the_nested_loop_without_network(nested_run, tmp_path: Path) -> None:
    out, err = nested_run(tmp_path / "run").communicate(timeout=280)
    last = json.loads(out.splitlines()[-1])
    assert last["steps"] == 1, err
    page = Path(last["report"]).read_text("utf-8")
    assert "<svg" in page
    store = RunStore.open_reader(tmp_path / "run" / "run.db")
    [report] = step_reports(store)
    assert report.episodes == 2
    assert report.dead_episodes == 0
    assert report.summary is not None
    assert -0.1 <= report.summary.reward.mean <= 1.0
    assert next(one.step for one in checkpoints(store)) == 0
    assert store.meta("commitment.c")
    runs = [job for job in store.jobs.all() if job.kind == "run"]
    assert runs
    assert all(job.state == "done" for job in runs)
    assert len(runs) == sum(one.accepted for one in _episodes(store))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interrupted_run_exits_130_and_the_same_command_finishes_it(
    nested_run, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = nested_run(run, "outer.steps=2")
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not _finished_episodes(run):
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "nestling run --resume" in err
    before = _finished_episodes(run)
    out, err = nested_run(run, "outer.steps=2").communicate(timeout=300)
    assert json.loads(out.splitlines()[-1])["steps"] == 2, err
    assert before <= _finished_episodes(run)
    assert len(step_reports(RunStore.open_reader(run / "run.db"))) == 2


def test_a_wrong_setting_is_a_usage_error(nested_run, tmp_path: Path) -> None:
    """As a process; `tests/cli/test_run.py` has the other mistakes."""
    process = nested_run(tmp_path / "run", "fleet.machine=moon")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert "has no price" in err
    assert "Traceback" not in err


def _episodes(store: RunStore) -> list:
    found = []
    for episode in store.episodes.all():
        found += [attempt for attempt in store.episodes.attempts(episode.id) if attempt.accepted]
    return found


def _finished_episodes(folder: Path) -> set[str]:
    if not (folder / "run.db").exists():
        return set()
    store = RunStore.open_reader(folder / "run.db")
    try:
        return {one.id for one in store.episodes.all(state="finished")}
    finally:
        store.close()
