"""The written rl.toml in prime-rl's own configuration classes.

NESTLING_PRIME_RL names a checkout whose `.venv` can import its configuration (docs/prime-rl.md says how to make one
without a GPU). Checked against commit 559b447.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nestling.inner.prime_rl_config import PrimeRlConfig
from nestling.inner.trainer import TrainRequest
from nestling.inner.trainers.prime_rl_folder import RunFolder
from nestling.jobs.bounds import LARGE, Key
from nestling.jobs.bundle import Bundle
from nestling.jobs.manifest import JobManifest, render_manifest
from nestling.jobs.rl_toml import RlRun, rl_document
from nestling.jobs.template import template_job

CHECKOUT = os.environ.get("NESTLING_PRIME_RL", "")
pytestmark = pytest.mark.skipif(
    not CHECKOUT,
    reason="NESTLING_PRIME_RL names no prime-rl checkout, so its configuration classes are not there",
)

MODELS = ("qwen3-0.6b", "qwen3-1.7b")
BESIDE: dict[str, dict[str, Any]] = {
    "batch_size": {"group_size": 2},
    "group_size": {"batch_size": 64},
    "max_steps": {"batch_size": 16},
    "warmup_steps": {"scheduler": "linear", "max_steps": 100},
    "decay_steps": {"scheduler": "linear", "max_steps": 100},
    "min_lr": {"scheduler": "linear", "lr": 1e-3, "warmup_steps": 1},
    "scheduler": {"warmup_steps": 1},
    "lora_alpha": {"lora_rank": 8},
    "lora_dropout": {"lora_rank": 8},
    "length_penalty": {"algo": "grpo"},
}
"""What must be set beside a key, so that it means something and no other rule is broken."""


def values(key: Key) -> Iterator[Any]:
    """Both ends of a range, every choice."""
    if key.kind == "choice":
        yield from key.choices
    elif key.kind == "bool":
        yield from (True, False)
    else:
        made = int if key.kind == "int" else float
        yield from (made(key.low), made(key.high))


def settings(key: Key, value: Any) -> dict[str, Any]:
    beside = dict(BESIDE.get(key.name, {}))
    if (
        key.only_with is not None
        and key.only_with[0] not in beside
        and key.only_with[0] != "lora_rank"
    ):
        beside[key.only_with[0]] = key.only_with[1][0]
    if (key.name, value) == ("scheduler", "constant"):
        beside = {}
    if (key.name, value) == ("decay_steps", 0):
        beside["warmup_steps"] = 1  # a schedule of no steps at all is refused
    return beside | {key.name: value}


def at(table: Any, path: str) -> Any:
    for part in path.split("."):
        name, _, index = part.partition("[")
        table = table[name]
        if index:
            table = table[int(index.rstrip("]"))]
    return table


def python(package: Path) -> tuple[str, dict[str, str]]:
    root = Path(CHECKOUT)
    sources = [root / "packages" / "prime-rl-configs" / "src", root / "src", package]
    path = os.pathsep.join(str(one) for one in sources)
    return str(root / ".venv" / "bin" / "python"), {"PATH": os.environ["PATH"], "PYTHONPATH": path}


def verdicts(documents: list[dict[str, Any]], package: Path) -> list[dict[str, Any]]:
    program, environment = python(package)
    done = subprocess.run(
        [program, Path(__file__).with_name("read_config.py")],
        input="\n".join(json.dumps(one) for one in documents),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture
def job(make_request: Callable[..., TrainRequest], tmp_path: Path) -> Callable[..., RunFolder]:
    """A real job of a family, placed as the trainer places it."""

    def make(model: str, **env: Any) -> RunFolder:
        manifest = JobManifest.build(model, bounds=LARGE, env=env)
        files = template_job("ledger").files | {"job.toml": render_manifest(manifest).encode()}
        plain = make_request()
        request = TrainRequest(
            bundle=Bundle.from_files(files),
            manifest=manifest,
            family="ledger",
            base_folder=plain.base_folder,
            out_folder=plain.out_folder,
            seed=0,
        )
        return RunFolder.prepare(tmp_path / "run", request, PrimeRlConfig())

    return make


def test_every_key_of_the_surface_lands_where_prime_rl_reads_it(
    job: Callable[..., RunFolder],
) -> None:
    folder = job(MODELS[0])
    cases = [
        (model, key, value, settings(key, value))
        for model in MODELS
        for key in LARGE.keys
        for value in values(key)
    ]
    run = RlRun(name="job-1", package=folder.package_name)
    documents = [
        rl_document(JobManifest.build(model, bounds=LARGE, **given), model, run)
        for model, _, _, given in cases
    ]
    found = verdicts(documents, folder.package)
    assert len(found) == len(cases)
    refused = [
        (model, key.name, value, verdict["error"])
        for (model, key, value, _), verdict in zip(cases, found, strict=True)
        if "error" in verdict
    ]
    assert refused == []
    assert {key.name for _, key, _, _ in cases} == set(LARGE.names())
    for (model, key, value, _), verdict in zip(cases, found, strict=True):
        config = verdict["config"]
        assert config["trainer"]["model"]["name"] == config["inference"]["vllm"]["model"]
        assert config["weight_broadcast"]["type"] == "filesystem", (model, key.name)
        if key.name == "length_penalty":
            assert (at(config, key.path) is not None) == value
        elif key.name == "lora_rank" and value == 0:
            assert config["trainer"]["model"]["lora"] is None
        else:
            assert at(config, key.path) == value, (model, key.name)


@pytest.mark.parametrize("model", MODELS)
def test_folder_of_a_run_passes_the_launcher_itself(
    job: Callable[..., RunFolder], model: str
) -> None:
    folder = job(model, num_rows=64)
    program, environment = python(folder.package)
    done = subprocess.run(
        [program, "-m", "prime_rl.entrypoints.rl", "@", folder.toml, "--dry-run"],
        env=environment,
        cwd=folder.root,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((folder.run / "configs" / "envs" / "train" / "job.json").read_text())
    assert written["env"]["taskset"]["id"] == folder.package_name
    assert written["env"]["taskset"]["num_rows"] == 64


def test_setting_that_the_jobs_package_does_not_know_is_refused(
    job: Callable[..., RunFolder],
) -> None:
    folder = job(MODELS[0])
    manifest = JobManifest.build(MODELS[0], bounds=LARGE, env={"num_rowz": 64})
    run = RlRun(name="job-1", package=folder.package_name)
    (verdict,) = verdicts([rl_document(manifest, MODELS[0], run)], folder.package)
    assert "num_rowz" in verdict["error"]
