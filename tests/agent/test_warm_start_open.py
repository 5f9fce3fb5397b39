"""An open model gets its first lessons as an adapter, and is then an agent like any other."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nestling.agent.warm_start import OPEN_PLAN, make_corpus, train_agent
from nestling.core.errors import ConfigError
from nestling.engine.checkpoint import load_model, save_model
from nestling.engine.config import ModelConfig
from nestling.engine.model import Model
from nestling.engine.tokenizer import Tokenizer
from nestling.engine.weights import Weights
from nestling.families.open_models import RECORD_FILE, FetchRecord, fetched_folder
from nestling.wiring.agents import AGENTS_FOLDER, agent_folder, load_agent


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A small model with a tokenizer that is not trained on the demonstrations to come."""
    tokenizer = Tokenizer.load(AGENTS_FOLDER / "hatchling")
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, num_layers=2,
        num_heads=2, num_kv_heads=1, head_dim=16, max_positions=2048,
    )  # fmt: skip
    model = Model(config=config, weights=Weights.seeded(config, 3), tokenizer=tokenizer)
    save_model(tmp_path / "base", model)
    return tmp_path / "base"


@pytest.mark.long
def test_an_adapter_learns_the_demonstrations_and_leaves_the_model_alone(
    base: Path, tmp_path: Path
) -> None:
    plan = replace(
        OPEN_PLAN, episodes=6, train_tokens=75_000, batch_tokens=1400, peak_lr=2e-2, lora_rank=4
    )
    before = load_model(base)
    corpus = make_corpus(plan, tmp_path / "work", tokenizer=before.tokenizer)
    assert len(corpus) == 6
    done = train_agent(plan, tmp_path / "work", tmp_path / "out", base=(str(base), base))
    first, last = done["losses"][0], done["losses"][-1]
    assert last[0] >= 50
    assert last[2] < first[2] - 0.2
    assert not (tmp_path / "out" / "model.safetensors").exists()
    taught = load_agent(tmp_path / "out", "cpu")
    assert taught.lora is None
    assert not torch.equal(taught.weights.flat, before.weights.flat)
    assert torch.equal(load_model(base).weights.flat, before.weights.flat)
    ids = corpus.row(0)[0]
    assert taught.tokenizer.decode(ids) == before.tokenizer.decode(ids)


def test_a_fetched_model_is_an_agent_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NESTLING_STATE", str(tmp_path))
    with pytest.raises(ConfigError, match="nestling models fetch smollm2-135m"):
        agent_folder("smollm2-135m")
    folder = fetched_folder(tmp_path, "smollm2-135m")
    folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match="not fetched"):
        agent_folder("smollm2-135m")
    record = FetchRecord(
        name="smollm2-135m", title="t", licence="l", licence_url="u", accepted_at=None,
        fetched_at=0.0, gguf_sha256="0" * 64, sha256="0" * 64, params=1,
    )  # fmt: skip
    (folder / RECORD_FILE).write_text(record.model_dump_json())
    assert agent_folder("smollm2-135m") == folder
