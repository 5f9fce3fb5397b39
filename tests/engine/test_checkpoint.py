import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nestling.core.errors import ModelError
from nestling.engine.checkpoint import load_model, load_weights, save_model, save_weights
from nestling.engine.config import ModelConfig
from nestling.engine.model import forward, logits
from nestling.engine.params import bind
from nestling.engine.weights import Weights, num_parameters, parts

from .conftest import GEMMA, make_config, make_model

LAYOUTS = {
    "llama": {"tie_embeddings": False},
    "llama_tied_mha": {"num_kv_heads": 4},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 16, "tie_embeddings": False},
    "gemma3": GEMMA,
}


def random_weights(config: ModelConfig, jobs: int = 1) -> Weights:
    generator = torch.Generator().manual_seed(3)
    weights = Weights.init(config, jobs, generator)
    weights.flat.add_(torch.randn(weights.flat.shape, generator=generator) * 0.05)
    return weights


@pytest.mark.parity
@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = make_config(**LAYOUTS[name])
    weights = random_weights(config)
    save_weights(tmp_path, weights)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert sum(p.numel() for p in peer.parameters()) == num_parameters(config)
    ids = torch.randint(
        0, config.vocab_size, (1, 3, 50), generator=torch.Generator().manual_seed(1)
    )
    params = bind(config, weights.views())
    with torch.no_grad():
        ours = logits(params, forward(params, config, ids).flatten(1, 2)).view(3, 50, -1)
        theirs = peer(input_ids=ids[0]).logits
    assert (ours - theirs).abs().max() < 1e-4
    peer.save_pretrained(tmp_path / "back")
    assert torch.equal(load_weights(tmp_path / "back").flat, weights.flat)


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    weights = random_weights(make_config(**LAYOUTS[name]), jobs=2)
    save_weights(tmp_path, weights, job=1)
    back = load_weights(tmp_path)
    assert back.config == weights.config
    assert torch.equal(back.flat, weights.flat[1:])
    assert back.content_hash() == weights.content_hash(1) != weights.content_hash(0)


def test_a_model_keeps_its_tokenizer_and_end_token(tmp_path: Path) -> None:
    model = make_model()
    save_model(tmp_path, model, dtype=torch.float16)
    back = load_model(tmp_path)
    assert back.tokenizer.encode("ann 12") == model.tokenizer.encode("ann 12")
    assert torch.equal(back.weights.flat, model.weights.flat.half().float())
    ends = json.loads((tmp_path / "generation_config.json").read_text())
    assert ends["eos_token_id"] == model.tokenizer.turn_end_id


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_weights(tmp_path, random_weights(make_config(tie_embeddings=False)))
    return tmp_path


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    held = load_file(path)
    for name, tensor in tensors.items():
        key = name.replace("__", ".")
        if tensor is None:
            held.pop(key)
        else:
            held[key] = tensor
    save_file(held, path)


def test_sharded_folders_load(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    whole = load_weights(folder)
    names = sorted(held)
    for i, chunk in enumerate((names[::2], names[1::2])):
        save_file({name: held[name] for name in chunk}, folder / f"part-{i}.safetensors")
    index = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert torch.equal(load_weights(folder).flat, whole.flat)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": {"model.norm.weight": "../model.safetensors"}}',
        '{"weight_map": {"model.norm.weight": "model.bin"}}',
        '{"weight_map": {"model.norm.weight": "absent.safetensors"}}',
        '{"weight_map": {"no.such.tensor": "model.safetensors"}}',
        '{"weight_map": {"model.norm.weight": "model.safetensors"}}',
    ],
)
def test_a_damaged_index_is_refused(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError):
        load_weights(folder)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model__norm__weight": None}, "missing"),
        ({"model__norm__weight": torch.ones(7)}, "shape"),
        ({"model__norm__weight": torch.full((32,), float("nan"))}, "NaN"),
        ({"model__norm__weight": torch.ones(32, dtype=torch.int8)}, "int8"),
        ({"model__extra__weight": torch.ones(32)}, "unexpected"),
    ],
)
def test_wrong_tensors_are_named(
    folder: Path, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    change(folder, **tensors)
    with pytest.raises(ModelError, match=message):
        load_weights(folder)


def test_cut_files_and_pickles_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not a readable"):
        load_weights(folder)
    path.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="never opened"):
        load_weights(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="no model"):
        load_weights(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mamba"},
        {"rope_scaling": {"rope_type": "llama3"}},
        {"hidden_act": "gelu"},
        {"mlp_bias": True},
        {"num_hidden_layers": "two"},
        {"hidden_size": -1},
        {"num_key_value_heads": 3},
    ],
)
def test_unsupported_configs_are_refused(folder: Path, changes: dict[str, object]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelError):
        load_weights(folder)


def test_tied_folder_may_repeat_the_embedding_but_not_differ(tmp_path: Path) -> None:
    weights = random_weights(make_config())
    save_weights(tmp_path, weights)
    change(tmp_path, lm_head__weight=weights.views()["embed"][0].clone())
    assert torch.equal(load_weights(tmp_path).flat, weights.flat)
    change(tmp_path, lm_head__weight=weights.views()["embed"][0] + 1)
    with pytest.raises(ModelError, match="ties"):
        load_weights(tmp_path)


def test_parts_cover_every_parameter() -> None:
    for changes in LAYOUTS.values():
        config = make_config(**changes)
        assert sum(torch.Size(part.shape).numel() for part in parts(config)) == num_parameters(
            config
        )
