"""Serving and exporting as a person does it, and an endpoint among the agents."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from nestling.config import load_recipe, recipe_toml
from nestling.engine.checkpoint import load_model, save_model
from nestling.store.run_store import RunStore
from nestling.wiring.agents import agent_folder

from .conftest import START, Run

TINY = ("--set", "inner.eval_items=8", "--set", "inner.leak_items=16", "--set", "fleet.workers=1")


@contextmanager
def serving(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[str]:
    """`nestling serve` on a free port; gives the URL that it prints."""
    with subprocess.Popen(
        [*START, "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    ) as running:
        assert running.stdout is not None
        try:
            url = running.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), running.stderr and running.stderr.read()
            yield url
        finally:
            running.send_signal(signal.SIGINT)
            assert running.wait(30) in (0, 130)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_base_model_is_served() -> None:
    secret = {"MY_TOKEN": "hush"}
    with (
        serving("nano", "--token-env", "MY_TOKEN", environment=secret) as url,
        httpx.Client(trust_env=False, timeout=60) as client,
    ):
        assert client.get(f"{url}/models").status_code == 401
        headers = {"Authorization": "Bearer hush"}
        listed = client.get(f"{url}/models", headers=headers).json()
        assert listed["data"][0]["id"] == "nano"
        asked = {
            "model": "nano",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 5,
            "logprobs": True,
        }
        answer = client.post(f"{url}/chat/completions", json=asked, headers=headers).json()
        assert 1 <= len(answer["choices"][0]["logprobs"]["content"]) <= 5


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "no agent"),
        (["hatchling", "--host", "0.0.0.0"], "token"),
        (["hatchling", "--max-len", "100000"], "at most 2048"),
        (["hatchling", "--port", "70000"], "port"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_served_is_refused(here: Run, arguments: list[str], told: str) -> None:
    done = here("serve", *arguments)
    assert done.code == 2
    assert told in done.err
    assert done.out == ""


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run that saved its untrained agent and one step."""
    run = tmp_path / "run"
    model = load_model(agent_folder("hatchling"))
    with RunStore(_made(run) / "run.db") as store:
        store.set_meta("run.name", "short")
        for step in range(2):
            name = f"step-{step:06d}"
            save_model(run / "learner" / name, model)
            store.learner.publish(step, step=step, handle=name, state_ref=name)
    (run / "config.toml").write_text(recipe_toml(load_recipe(None)))
    return run


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_run_is_exported(here: Run, run_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = here("export", str(run_folder), "--out", str(out), "--json")
    assert done.code == 0, done.err
    assert done.last["kind"] == "model"
    assert (done.last["step"], done.last["folder"]) == (1, str(out))
    assert "license: apache-2.0" in (out / "README.md").read_text()
    assert f"nestling export {run_folder}" in (out / "README.md").read_text()
    again = here("export", str(run_folder), "--out", str(out))
    assert (again.code, "exists" in again.err) == (2, True)
    other = here("export", str(run_folder), "--step", "9", "--out", str(tmp_path / "b"))
    assert (other.code, "expected one of 0, 1" in other.err) == (2, True)
    none = here("export", str(tmp_path), "--out", str(tmp_path / "c"))
    assert none.code == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_endpoint_and_embedded_agents_on_one_page(process: Run, tmp_path: Path) -> None:
    with serving("hatchling") as url:
        named = f"endpoint:{url}#hatchling?temperature=0.5&style=compact&max_turn_tokens=512"
        done = process(
            "eval-agent", "--agents", f"embedded,{named}", "--families", "ledger", "-n", "1",
            "--folder", str(tmp_path / "eval"), "--json", *TINY, "--set", "outer.temperature=0.5",
        )  # fmt: skip
    assert done.code == 0, done.err
    own, remote = done.last["arms"]["embedded"], done.last["arms"][named]
    assert (own["n"], remote["n"], remote["dead"]) == (1, 1, 0)
    # The same weights, seeds and temperature, so the same jobs.
    assert remote["reward_mean"] == pytest.approx(own["reward_mean"])
    assert done.last["arms"]["noop"]["n"] == 1
