"""`nestling fleet up | ls | down | simulate-runpod` as a person types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nestling.cli.main import main

from .conftest import IMAGE, free_port

REPO = Path(__file__).parents[2]
RECIPE = str(REPO / "recipes" / "runpod.toml")


def nestling(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nestling", *words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["down"], "--run FOLDER and --all"),
        (["ls"], "RUNPOD_API_KEY"),
        (["up", str(REPO / "recipes" / "quick.toml")], "expected runpod"),
        (["up", RECIPE], "fleet.image is missing"),
    ],
    ids=lambda value: " ".join(value)[:20] if isinstance(value, list) else "",
)
def test_wrong_usage_is_code_2_and_says_how(
    words: list[str], hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "")
    monkeypatch.setattr(sys, "argv", ["nestling", "fleet", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert hint in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pods_are_rented_listed_and_ended(tmp_path: Path) -> None:
    faults = tmp_path / "faults.json"
    faults.write_text(json.dumps({"boot_s": 20, "pod": [{"pods": [1], "do": "delete_lag"}]}))
    simulator = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "nestling",
            "fleet",
            "simulate-runpod",
            "--json",
            "--listen",
            f"127.0.0.1:{free_port()}",
            "--speed",
            "20",
            "--faults",
            str(faults),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert simulator.stdout is not None
        told = json.loads(simulator.stdout.readline())
        key = {"RUNPOD_API_KEY": told["key"], "NESTLING_STATE": str(tmp_path / "state")}
        api = ["--api-url", told["url"]]
        here = f"127.0.0.1:{free_port()}"
        settings = [f"fleet.image={IMAGE}", f"fleet.listen={here}", f"fleet.address=https://{here}"]
        settings += [f"fleet.api_url={told['url']}"]
        sets = [word for setting in settings for word in ("--set", setting)]
        run = str(tmp_path / "run")
        up = nestling("fleet", "up", RECIPE, *sets, "--out", run, "--pods", "2", "--json", **key)
        assert up.returncode == 0, up.stderr
        assert json.loads(up.stdout)["usd_per_hour"] == pytest.approx(0.54)
        listed = json.loads(nestling("fleet", "ls", *api, "--json", **key).stdout)
        assert [pod["status"] for pod in listed["pods"]] == ["RUNNING", "RUNNING"]
        elsewhere = nestling("fleet", "down", "--all", "--pool", "other", *api, **key)
        assert elsewhere.returncode == 0
        down = nestling("fleet", "down", "--run", run, *api, "--json", **key)
        assert down.returncode == 0, down.stderr
        assert len(json.loads(down.stdout)["ended"]) == 2
        assert json.loads(nestling("fleet", "ls", *api, "--json", **key).stdout)["pods"] == []
    finally:
        simulator.send_signal(signal.SIGINT)
        rest, _ = simulator.communicate(timeout=60)
    report = json.loads(rest.splitlines()[-1])
    assert (report["pods_made"], report["pods_left"]) == (2, 0)
    assert report["usd"] > 0
