"""The jobs for open models: valid as they are, and run to their end with a model of the same kind, only tiny."""

from pathlib import Path

import pytest
import torch

from nestling.jobs.bounds import OPEN
from nestling.jobs.bundle import Bundle, freeze
from nestling.jobs.manifest import JobManifest, render_manifest
from nestling.jobs.template import template_job

from .conftest import EXAMPLES, Run, can_run

FAMILIES = ("calc_chain", "multi_hop", "string_pipeline")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_examples_are_the_template_jobs_with_a_warm_up(family: str) -> None:
    bundle, template = freeze(EXAMPLES / "open-model" / family), template_job(family)
    manifest = bundle.manifest(OPEN)
    assert manifest.base_model == "smollm2-135m"
    assert manifest.sft is not None
    rest = {path: data for path, data in bundle.files.items() if path != "job.toml"}
    assert rest == {path: data for path, data in template.files.items() if path != "job.toml"}


@pytest.fixture
def tiny_base(tmp_path: Path) -> Path:
    """An open layout and tokenizer with random weights."""
    pytest.importorskip("gguf")
    from nestling.engine.config import ModelConfig
    from nestling.engine.gguf_folder import convert
    from nestling.engine.weights import Weights

    from ..engine.gguf_files import write_llama

    config = ModelConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=16, max_positions=2048,
    )  # fmt: skip
    weights = Weights.init(config, 1, torch.Generator().manual_seed(0))
    write_llama(tmp_path / "tiny.gguf", weights)
    convert(tmp_path / "tiny.gguf", tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not can_run("bwrap", "--ro-bind", "/", "/", "true"), reason="needs bubblewrap")
def test_an_open_model_is_warmed_up_trained_and_scored(
    here: Run, tmp_path: Path, tiny_base: Path
) -> None:
    manifest = JobManifest.build(
        "smollm2-135m", bounds=OPEN, sft={"steps": 4, "rows": 4, "lr": 1e-3},
        max_steps=1, batch_size=16, max_tokens=16, max_turns=6, seq_len=2048,
    )  # fmt: skip
    files = dict(freeze(EXAMPLES / "open-model" / "calc_chain").files)
    files["job.toml"] = render_manifest(manifest).encode()
    Bundle.from_files(files).write(tmp_path / "calc_chain")
    settings = (
        "--set", "models.shipped=false",
        "--set", f'models.extra=[{{name="smollm2-135m", folder="{tiny_base}"}}]',
    )  # fmt: skip
    checked = here("job", "check", str(tmp_path / "calc_chain"), *settings, "--json")
    assert checked.code == 0, checked.out + checked.err
    done = here(
        "job", "run", str(tmp_path / "calc_chain"), "--eval-items", "8", *settings, "--json"
    )
    assert done.code == 0, done.out + done.err
    outcome = done.last
    assert (outcome["status"], outcome["base_model"]) == ("succeeded", "smollm2-135m")
    assert (outcome["train_steps"], outcome["n"]) == (1, 8)
    warmed = outcome["warm_up"]
    assert (warmed["steps"], warmed["examples"]) == (4, 64)
    assert warmed["last_loss"] < warmed["first_loss"]
    assert outcome["delta_norm"] > 0
    assert outcome["final_hash"] != outcome["base_hash"]
    plain = here("job", "check", str(tmp_path / "calc_chain"), "--json")
    assert plain.code == 1
    assert "smollm2-135m" in plain.out
