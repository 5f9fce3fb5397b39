"""Small models for the engine's tests."""

from collections.abc import Callable

import pytest
import torch

from nestling.engine.config import ModelConfig
from nestling.engine.model import Model
from nestling.engine.tokenizer import Tokenizer
from nestling.engine.weights import Weights

TOKENIZER = Tokenizer.closed(["ann", "bob", "cat", *"0123456789"])


GEMMA = {
    "qk_norm": True,
    "rope_theta": 1e6,
    "gemma": {"query_scalar": 16, "window": 5, "local_rope_theta": 1e3, "global_layers": (1,)},
}
"""A Gemma 3 in which every part matters: windows shorter than the texts, both kinds of layers."""


def make_config(**changes: object) -> ModelConfig:
    values = {
        "vocab_size": TOKENIZER.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_positions": 256,
        **changes,
    }
    return ModelConfig.model_validate(values)


def make_model(num_jobs: int = 1, seed: int = 0, **changes: object) -> Model:
    config = make_config(**changes)
    generator = torch.Generator().manual_seed(seed)
    weights = Weights.init(config, num_jobs, generator)
    with torch.no_grad():  # larger weights: a fresh model's predictions are too flat to tell errors
        weights.flat.mul_(1.5)
    return Model(config=config, weights=weights, tokenizer=TOKENIZER)


@pytest.fixture
def new_model() -> Callable[..., Model]:
    return make_model
