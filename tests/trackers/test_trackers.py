import json
import logging
import math
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from nestling.core.errors import ConfigError
from nestling.outer.store_log import step_reports, sweeps
from nestling.store import RunStore
from nestling.trackers import glossary
from nestling.trackers.follow import Follower, following, send_recorded, tracked
from nestling.trackers.glossary import STEP, step_metrics, sweep_metrics
from nestling.trackers.tracker import open_tracker

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"


class Kept:
    """A tracker in memory."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.logged: list[dict[str, float]] = []
        self.closed = 0
        self.fails_at = fails_at

    def log(self, values):
        if values[STEP] == self.fails_at:
            raise OSError("no route to host")
        self.logged.append(dict(values))

    def close(self):
        self.closed += 1


@pytest.fixture(scope="module")
def store(run_folder):
    with RunStore.open_reader(run_folder / "run.db") as found:
        yield found


def test_metrics_are_the_numbers_of_the_record(store):
    report = step_reports(store)[-1]
    found = step_metrics(report)
    assert found[STEP] == report.step
    assert found["reward/mean"] == report.summary.reward.mean
    assert found["reward/lo"] == report.summary.reward.lo
    assert found["jobs/first_try_share"] == report.summary.first_try_validity
    assert found["update/kl_initial"] == report.update.kl_initial
    assert found["family/ledger/reward"] == report.reward_by_family["ledger"]
    assert "update/kl_sampler" not in found  # this learner cannot tell
    skipped = report.model_copy(update={"update": None, "summary": None, "skipped": True})
    assert not [name for name in step_metrics(skipped) if name.startswith(("update/", "reward/"))]
    strange = report.model_copy(update={"eta_s": math.inf})
    assert "outer/eta_s" not in step_metrics(strange)


def test_sweeps_name_the_trained_agent_the_same_each_time(store):
    step, sweep = max(sweeps(store).items())
    found = sweep_metrics(step, sweep)
    assert found[STEP] == step
    arm = f"step-{step:06d}"
    assert found["measured/triage/agent_reward"] == sweep.result(arm, "triage").summary.reward.mean
    gain = sweep.comparison(arm, "untrained", "triage").difference
    assert found["measured/triage/agent_gain"] == gain.mean
    assert found["measured/triage/agent_gain_lo"] == gain.lo
    assert "measured/triage/noop_reward" in found


def test_every_name_is_in_the_glossary_and_the_page_is_the_glossary(store):
    meanings = {one.name: one.meaning for one in glossary.STEP_METRICS} | glossary.FAMILY_METRICS
    table = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in meanings.items())
    assert f"| metric | meaning |\n| --- | --- |\n{table}" in DOC.read_text("utf-8")
    sent = {name for one in step_reports(store) for name in step_metrics(one)}
    sent |= {name for step, one in sweeps(store).items() for name in sweep_metrics(step, one)}
    patterns = [re.escape(one.name) for one in glossary.STEP_METRICS]
    patterns += [re.sub("[A-Z]+", "[a-z0-9_.-]+", name) for name in glossary.FAMILY_METRICS]
    unknown = [name for name in sent if not any(re.fullmatch(one, name) for one in patterns)]
    assert unknown == []


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(store, caplog):
    follower, good, bad = Follower(), Kept(), Kept(fails_at=2)
    follower.add("good", good)
    follower.add("bad", bad)
    with caplog.at_level(logging.WARNING):
        count = send_recorded(store, follower)
    steps = [one[STEP] for one in good.logged]
    assert count == 4
    assert steps == [0, 1, 2, 3, 4, 4]  # a sweep before the first step and after the last
    assert [one[STEP] for one in bad.logged] == [0, 1]
    assert follower.kinds == ("good",)
    assert "no route to host" in caplog.text
    follower.close()
    follower.close()
    assert (good.closed, bad.closed) == (1, 0)


def test_a_run_keeps_its_id_wherever_it_is_named_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = tracked(Path("run"), "run", {})
    assert here.run_id == tracked(tmp_path / "run", "run", {}).run_id
    assert here.run_id != tracked(tmp_path / "other", "run", {}).run_id


def test_missing_package_is_named_with_the_fix(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.delitem(sys.modules, "nestling.trackers.tensorboard_tracker", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'nestling\[tensorboard\]'"):
        open_tracker("tensorboard", tracked(tmp_path, "run", {}))


def _run(folder):
    return replace(tracked(folder, "run", {"outer": {"steps": 4}}), project="nestling-test")


def test_tensorboard_writes_every_value(store, tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    with following(["tensorboard"], _run(tmp_path)) as follower:
        send_recorded(store, follower)
    (path,) = (tmp_path / "trackers" / "tensorboard").iterdir()
    data, found = path.read_bytes(), {}
    while data:
        size = int.from_bytes(data[:8], "little")
        body = data[12 : 12 + size]
        assert int.from_bytes(data[12 + size : 16 + size], "little") == masked_crc32c(body)
        event = Event.FromString(body)
        for value in event.summary.value:
            found[value.tag, event.step] = value.simple_value
        data = data[16 + size :]
    for report in step_reports(store):
        expected = report.summary.reward.mean
        assert found["reward/mean", report.step] == pytest.approx(expected, rel=1e-6)
    assert ("measured/triage/agent_gain", 4) in found


def _track(run_folder, copy, kind, **environment):
    """The command in a process of its own: both packages read their settings when imported."""
    shutil.copytree(run_folder, copy)
    done = subprocess.run(
        [sys.executable, "-m", "nestling", "track", str(copy), "--to", kind],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"sent 4 steps to {kind}" in done.stderr


@pytest.mark.slow
def test_wandb_offline_takes_the_run(run_folder, tmp_path):
    pytest.importorskip("wandb")
    _track(run_folder, tmp_path / "run", "wandb", WANDB_MODE="offline")
    (recorded,) = (tmp_path / "run" / "trackers").rglob("run-*.wandb")
    data = recorded.read_bytes()
    assert b"reward/mean" in data
    assert b"measured/triage/agent_gain" in data


@pytest.mark.slow
def test_trackio_takes_the_run(run_folder, store, tmp_path):
    pytest.importorskip("trackio")
    _track(run_folder, tmp_path / "run", "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    found = {}
    with closing(sqlite3.connect(tmp_path / "trackio" / "nestling.db")) as connection:
        for step, text in connection.execute("SELECT step, metrics FROM metrics"):
            found.setdefault(step, {}).update(json.loads(text))
    for report in step_reports(store):
        assert found[report.step]["reward/mean"] == pytest.approx(report.summary.reward.mean)
    assert "measured/triage/agent_gain" in found[4]
