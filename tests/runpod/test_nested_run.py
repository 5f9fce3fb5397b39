"""The whole product on rented machines, rehearsed: agent, probe, jail, training, scoring, update."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nestling.outer.store_log import step_reports
from nestling.store.run_store import RunStore

from .conftest import IMAGE, free_port

ROOM_GIB = 0.85
"""Memory of a pod's supervisor, worker, scorer and jails, measured."""


def num_pods() -> int:
    """Sixteen, or as many as there is memory for; NESTLING_TEST_PODS asks for fewer."""
    room = int(psutil.virtual_memory().available / 2**30 / ROOM_GIB)
    return min(16, room, int(os.environ.get("NESTLING_TEST_PODS", "16")))


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap"),
    pytest.mark.skipif(num_pods() < 3, reason="needs memory for three machine rooms with torch"),
]

REPO = Path(__file__).parents[2]
NUM_PODS = num_pods()
GROUP_SIZE = NUM_PODS // 2
CAP_USD = 30.0
SETTINGS = (
    f"fleet.workers={NUM_PODS}",
    f"fleet.max_usd={CAP_USD}",
    "fleet.tick_s=2.0",
    "fleet.cool_s=5.0",
    "fleet.grace_s=20.0",
    "fleet.boot_s=240.0",
    "fleet.heartbeat_s=60.0",
    "outer.steps=1",
    "outer.groups_per_step=2",
    f"outer.group_size={GROUP_SIZE}",
    f"outer.max_parallel_episodes={2 * GROUP_SIZE}",
    "outer.held_out.every_steps=0",
    "inner.eval_items=8",
    "inner.leak_items=0",
)
FAULTS = """\
boot_s = 120.0
boot_spread = 0.3
per_minute = 400
list_lag_s = 10.0

[[stock]]
gpu = "NVIDIA RTX A5000"
count = 5
usd_per_hour = 0.27
[[stock]]
gpu = "NVIDIA A40"
count = 6
usd_per_hour = 0.44
[[stock]]
gpu = "NVIDIA GeForce RTX 4090"
count = 12
usd_per_hour = 0.74

[[request]]
route = "create"
nth = [2, 6]
do = "reply_lost"
how = "closed"
[[request]]
route = "create"
nth = [4]
do = "not_done"
how = "500"
[[request]]
route = "create"
nth = [8, 9]
do = "stock_out"
[[request]]
route = "list"
nth = [10, 11, 12, 13]
do = "status"
status = 503
[[request]]
route = "delete"
nth = [1, 3]
do = "status"
status = 500

[[pod]]
pods = [1]
do = "freeze"
after_s = 300
[[pod]]
pods = [2]
do = "slow"
seconds = 200
[[pod]]
pods = [3]
do = "kill"
after_s = 400
[[pod]]
pods = [5]
do = "vanish"
after_s = 500
[[pod]]
pods = [6]
do = "error"
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("NESTLING_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return dict(os.environ)


def test_nested_loop_on_faulty_pods(environment: dict[str, str], tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text(FAULTS)
    simulator = subprocess.Popen(
        [*_nestling("fleet", "simulate-runpod", "--listen", f"127.0.0.1:{free_port()}"),
         "--speed", "10", "--faults", str(faults), "--folder", str(tmp_path / "account"), "--json"],
        env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert simulator.stdout is not None
        told = json.loads(simulator.stdout.readline())
        here = f"127.0.0.1:{free_port()}"
        settings = (
            *SETTINGS,
            f"fleet.image={IMAGE}",
            f"fleet.api_url={told['url']}",
            f"fleet.address=https://{here}",
            f"fleet.listen={here}",
        )
        words = _nestling("run", str(REPO / "recipes" / "runpod.toml"), "--json")
        words += ["--out", str(tmp_path / "run")]
        words += [word for setting in settings for word in ("--set", setting)]
        done = subprocess.run(
            words,
            env=environment | {"RUNPOD_API_KEY": told["key"]},
            capture_output=True,
            text=True,
            check=False,
            timeout=3400,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads(done.stdout.splitlines()[-1])["steps"] == 1
    finally:
        simulator.send_signal(signal.SIGINT)
        rest, _ = simulator.communicate(timeout=60)
    report = json.loads(rest.splitlines()[-1])
    print(report)
    assert report["pods_left"] == 0
    assert (
        report["pods_made"] > NUM_PODS // 2
    )  # as many as jobs waited for, up to NUM_PODS at a time
    assert report["usd"] <= CAP_USD
    store = RunStore.open_reader(tmp_path / "run" / "run.db")
    [step] = step_reports(store)
    assert (step.episodes, step.dead_episodes) == (2 * GROUP_SIZE, 0)
    jobs = store.jobs.all()
    assert {job.state for job in jobs} == {"done"}
    machines = {entry["machine"] for entry in json.loads(done.stdout.splitlines()[-1])["spending"]}
    assert machines <= {"a5000", "a40", "rtx4090"}
    print(len(jobs), "jobs,", sum(job.tries for job in jobs), "tries")
    _assert_no_secret(tmp_path, told["key"])


def _nestling(*words: str) -> list[str]:
    return [sys.executable, "-m", "nestling", *words]


def _assert_no_secret(folder: Path, key: str) -> None:
    """Neither the account's key nor the seed of the hidden items is in the run or in a pod's log."""
    seed = (folder / "state" / "eval-secret").read_bytes()
    needles = [key.encode(), seed, seed.hex().encode()]
    for part in ("run", "account"):
        for path in (folder / part).rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                assert not any(needle in data for needle in needles), path
