"""Recipes choose prime-rl and a server; a whole job goes through both."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nestling.config import RunConfig, load_recipe
from nestling.core.errors import ConfigError
from nestling.families.splits import EvalSecret
from nestling.inner.models_config import bounds_of
from nestling.inner.openai_config import OpenAiConfig
from nestling.inner.prime_rl_config import PrimeRlConfig
from nestling.jobs.bounds import LARGE
from nestling.jobs.bundle import Bundle
from nestling.jobs.manifest import JobManifest, render_manifest
from nestling.jobs.outcome import StepRecord
from nestling.jobs.template import template_job
from nestling.wiring.checks import check_names
from nestling.wiring.rooms import Room

RECIPE = Path(__file__).parents[2] / "recipes" / "two_gpu.toml"
UNJAILED = "inner.prime_rl.unjailed=true"


def test_two_gpu_recipe_has_prime_rl_its_bounds_and_vllm() -> None:
    config = load_recipe(RECIPE)
    assert (config.inner.trainer, config.inner.scorer, config.inner.openai.kind) == (
        "prime_rl",
        "openai",
        "vllm",
    )
    assert config.inner.prime_rl.num_gpus == 2
    bounds = bounds_of(config.models, config.inner.trainer)
    assert bounds.keys == LARGE.keys
    assert bounds.base_models == ("qwen3-0.6b", "qwen3-1.7b")


def test_unjailed_code_is_a_choice_that_somebody_makes() -> None:
    with pytest.raises(ConfigError, match="unjailed = true"):
        check_names(load_recipe(RECIPE))
    check_names(load_recipe(RECIPE, [UNJAILED]))
    with pytest.raises(ConfigError, match="shipped"):
        check_names(load_recipe(RECIPE, [UNJAILED, "models.shipped=true"]))


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (PrimeRlConfig, {"share_gpu": True, "infer_gpus": 2}),
        (OpenAiConfig, {"kind": "url"}),
        (OpenAiConfig, {"url": "http://h/v1"}),
        (OpenAiConfig, {"kind": "url", "url": "http://h/v1", "program": "vllm"}),
        (OpenAiConfig, {"kind": "url", "url": "http://me:secret@h/v1"}),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    model: Any, values: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        model.model_validate(values)


@pytest.mark.slow
def test_a_job_is_trained_by_prime_rl_and_scored_by_a_server(
    program: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real probe, jail, scorer process and server of ours; the `rl` program is the stand-in."""
    monkeypatch.setenv("NESTLING_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("STANDIN_FAULT", "")
    EvalSecret.load_or_create(tmp_path / "state" / "eval-secret")
    config = RunConfig.model_validate(
        {
            "models": {"shipped": False, "extra": [{"name": "tiny", "folder": str(base)}]},
            "inner": {
                "trainer": "prime_rl",
                "prime_rl": {"program": str(program), "poll_s": 0.05, "unjailed": True},
                "scorer": "openai",
                "openai": {"kind": "nestling", "parallel": 8},
                "eval_items": 8,
                "leak_items": 20,
                "keep_models": True,
            },
        }
    )
    bounds = bounds_of(config.models, config.inner.trainer)
    manifest = JobManifest.build("tiny", bounds=bounds, max_steps=2, batch_size=16, lora_rank=4)
    files = template_job("ledger").files | {"job.toml": render_manifest(manifest).encode()}
    steps: list[StepRecord] = []
    with closing(Room(config, tmp_path / "state", tmp_path / "work")) as room:
        outcome = room.run(Bundle.from_files(files), "ledger", steps.append)
    assert outcome.status == "succeeded", outcome.detail
    assert outcome.train_steps == len(steps) == 2
    assert outcome.n == 8
    assert outcome.pre is not None
    assert outcome.post is not None
    assert outcome.delta_norm is not None
    assert outcome.delta_norm > 0
    assert outcome.model_ref is not None
    assert (tmp_path / "work" / outcome.model_ref / "model.safetensors").is_file()
