"""Episodes and comparisons with real jobs."""

import json
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest

from nestling.bench.agents import read_agent
from nestling.core.errors import ConfigError
from nestling.wiring.agents import agent_folder

from .conftest import START, Run

TINY = ("--set", "inner.eval_items=8", "--set", "inner.leak_items=16", "--set", "fleet.workers=1")
ARM_FIELDS = {
    "n", "reward_mean", "reward_ci", "validity", "job_success", "uplift_mean", "uplift_ci",
    "gain_over_noop", "p_value",
}  # fmt: skip


def test_equal_weights_are_one_arm_whatever_they_are_called(tmp_path: Path) -> None:
    shipped = read_agent("embedded")
    assert shipped.arm.startswith("hatchling-")
    assert read_agent("embedded:hatchling").arm == shipped.arm
    run = tmp_path / "run"
    for step in ("step-000000", "step-000002"):
        shutil.copytree(agent_folder("hatchling"), run / "learner" / step)
    (run / "run.db").touch()
    assert read_agent(f"embedded:{run}").folder == run / "learner" / "step-000002"
    weights = run / "learner" / "step-000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert read_agent(f"embedded:{run}").arm.rpartition("-")[2] != shipped.arm.rpartition("-")[2]


@pytest.mark.parametrize("text", ["", "gpt", "embedded:", "embedded:/nowhere", "noop:x"])
def test_unknown_agents_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected"):
        read_agent(text)
    with pytest.raises(ConfigError, match="expected"):
        read_agent(f"embedded:{tmp_path}")


def test_the_same_agent_twice_is_refused(here: Run) -> None:
    done = here("eval-agent", "--agents", "embedded,embedded:hatchling")
    assert done.code == 2
    assert "same weights" in done.err


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["noop", "embedded"])
def test_episode_is_paid(process: Run, policy: str) -> None:
    done = process(
        "episode", "--policy", policy, "--family", "ledger", "--seed", "1", "--show", "--json",
        *TINY,
    )  # fmt: skip
    assert done.code == 0, done.err
    last = done.last
    assert {"reward", "terms", "attempts", "outcome", "turns", "tokens"} <= set(last)
    assert set(last["terms"]) == {"validation", "quality", "speed"}
    assert "--- system" in done.out
    assert last["turns"] == done.out.count("--- assistant")
    assert (last["tokens"] > 0) is (policy == "embedded")
    if policy == "noop":
        assert (last["outcome"], last["attempts"]) == ("job_succeeded", 1)
        assert last["job"]["train_steps"] == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_comparison_is_paired_and_continues(process: Run, tmp_path: Path) -> None:
    folder, out = tmp_path / "eval", tmp_path / "figures.json"
    asked = ["eval-agent", "--families", "ledger", "--folder", str(folder), "--json", *TINY]
    first = process(*asked, "--agents", "embedded", "-n", "1", "--out", str(out))
    assert first.code == 0, first.err
    assert json.loads(out.read_text()) == first.last
    assert set(first.last["arms"]) == {"noop", "embedded"}
    for row in first.last["arms"].values():
        assert set(row) >= ARM_FIELDS
        assert (row["n"], row["dead"]) == (1, 0)
    noop, agent = (first.last["arms"][name] for name in ("noop", "embedded"))
    assert agent["gain_over_noop"] == pytest.approx(agent["reward_mean"] - noop["reward_mean"])
    again = process(*asked, "--agents", "noop,embedded", "-n", "1")
    assert again.last["arms"] == first.last["arms"]
    assert "job_" not in again.err, "nothing is played twice"
    more = process(*asked, "--agents", "noop", "-n", "2")
    assert more.last["arms"]["noop"]["n"] == 2
    other = process(*asked, "--agents", "noop", "--set", "inner.seed=5")
    assert other.code == 2
    assert "other settings" in other.err
    assert tomllib.loads((folder / "config.toml").read_text())["inner"]["seed"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interrupted_comparison_is_code_130_and_continues(tmp_path: Path) -> None:
    asked = [
        *START, "eval-agent", "--agents", "noop", "--families", "ledger", "-n", "2",
        "--folder", str(tmp_path / "eval"), "--json", "--set", "outer.max_parallel_episodes=1",
        *TINY,
    ]  # fmt: skip
    with subprocess.Popen(
        asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if line.startswith("noop ledger"):
                break
        running.send_signal(signal.SIGINT)
        said = running.stderr.read()
        assert running.wait(120) in (0, 130), said
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["arms"]["noop"]["n"] == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_baselines_are_kept(process: Run) -> None:
    asked = ["baselines", "--families", "ledger", "--items", "8", "--split", "b", "--json"]
    first = process(*asked)
    assert first.code == 0, first.err
    assert {one["base_model"] for one in first.last["baselines"]} == {"nano", "micro"}
    for one in first.last["baselines"]:
        lo, hi = one["score_ci"]
        assert 0 <= lo <= one["score"] <= hi <= 1
    assert process(*asked).last == first.last


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bench_writes_figures_with_their_circumstances(process: Run, tmp_path: Path) -> None:
    out = tmp_path / "results" / "spread.json"
    done = process(
        "bench", "spread", "--families", "ledger", "--seeds", "2", "--items", "8",
        "--jobs", "few_samples,noop", "--out", str(out), "--json", "--set", "inner.leak_items=16",
    )  # fmt: skip
    assert done.code == 0, done.err
    record = json.loads(out.read_text())
    assert record == done.last
    assert {"machine", "versions", "command", "commit", "runs", "figures", "ratios"} <= set(record)
    assert record["versions"]["torch"]
    assert [row["job"] for row in record["runs"]] == ["few_samples", "noop"]
    noop = record["figures"]["uplift_by_job"]["noop"]
    assert noop["uplift_mean"] == 0
    assert len(record["runs"][0]["uplifts"]) == 2
