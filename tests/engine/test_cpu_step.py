import pytest
import torch

from nestling.engine.cpu_cache import CpuCache
from nestling.engine.cpu_step import CpuStep
from nestling.engine.lora import LoraConfig, LoraWeights
from nestling.engine.model import KVCache, Model, decode, extend
from nestling.engine.shared_prompts import SharedPrompts

from .conftest import make_model

START = torch.tensor([[0, 3, 9]])
MORE = torch.arange(12).view(1, 3, 4) % 11 + 5


def with_lora(model: Model) -> Model:
    generator = torch.Generator().manual_seed(1)
    model.lora = LoraWeights.init(model.config, LoraConfig(), 1, generator, model.device)
    with torch.no_grad():  # adapters start at zero: make them count
        model.lora.flat.add_(torch.randn(model.lora.flat.shape, generator=generator) * 0.05)
    return model


@pytest.mark.parametrize(
    ("changes", "lora"),
    [
        ({}, False),
        ({"num_kv_heads": 4}, False),
        ({"attention_bias": True, "num_kv_heads": 1}, False),
        ({"tie_embeddings": False}, True),
    ],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_equals_the_plain_functions(changes: dict[str, object], lora: bool, ragged: bool) -> None:
    model = with_lora(make_model(**changes)) if lora else make_model(**changes)
    if model.config.attention_bias:
        bias = model.weights.views()["layers.0.qkv_bias"]
        bias.copy_(torch.linspace(-1, 1, bias.numel()).view(bias.shape))
    config, params = model.config, model.params()
    cache = KVCache(config, 4, 32)
    ours = CpuStep(params, config, CpuCache(config, 4, 32))
    assert CpuStep.fits(params, config)
    rows = torch.arange(3)
    first = torch.arange(27).view(1, 3, 9) % 13 + 5
    empty = torch.zeros(1, 3, dtype=torch.long)
    ours.extend(first[0], empty[0], rows)
    extend(params, config, first, empty, cache, rows)
    start = START if ragged else torch.full_like(START, 9)
    ours.extend(MORE[0], start[0], rows)
    extend(params, config, MORE, start, cache, rows)
    token = torch.tensor([[5, 6, 7]])
    for step in range(3):
        position = start + 4 + step
        width = int(position.max()) + 1
        found = ours.decode(token[0], position[0], width)
        expected = decode(params, config, token, position, cache, width)
        assert (found - expected[0]).abs().max() < 2e-5


def test_refuses_what_it_cannot_compute() -> None:
    several, normed = make_model(num_jobs=2), make_model(qk_norm=True)
    half = make_model()
    half.compute_dtype = torch.bfloat16
    for model in (several, normed, half):
        assert not CpuStep.fits(model.params(), model.config)


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 4}, {"num_kv_heads": 1}])
@pytest.mark.parametrize("lengths", [(20, 20), (24, 18)])
def test_shared_prompts_change_nothing_but_rounding(
    changes: dict[str, object], lengths: tuple[int, int]
) -> None:
    model = make_model(**changes)
    config, params = model.config, model.params()
    plain, shared = (CpuStep(params, config, CpuCache(config, 6, 48)) for _ in range(2))
    shared.prompts = SharedPrompts(shared.cache, worth_bytes=0)
    groups = [[0, 3, 4], [1, 2]]  # neighbours in the cache need not share a prompt
    for ours in (plain, shared):
        for seed, (group, length) in enumerate(zip(groups, lengths, strict=True)):
            ids = (torch.arange(length) * (seed + 3))[None] % 13 + 5
            for row in group:
                ours.extend(ids, torch.tensor([0]), torch.tensor([row]))
            if ours is shared:
                ours.prompts.add(group, length)
    assert shared.prompts.plan(5) is not None
    assert plain.prompts.plan(5) is None
    start = torch.tensor([lengths[0], lengths[1], lengths[1], lengths[0], lengths[0]])

    def compare(token: torch.Tensor, position: torch.Tensor) -> None:
        width = int(position.max()) + 1
        found = shared.decode(token, position, width)
        assert (found - plain.decode(token, position, width)).abs().max() < 2e-5

    for step in range(3):
        compare(torch.tensor([5, 6, 7, 8, 9]) + step, start + step)
    for ours in (plain, shared):  # row 1 has ended, row 4 takes its place
        ours.cache.move(torch.tensor([4]), torch.tensor([1]), 40)
        ours.prompts.move([4], [1])
    position = torch.stack((start[0] + 3, start[4] + 3, start[2] + 3, start[3] + 3))
    assert shared.prompts.plan(4) is not None
    compare(torch.tensor([5, 6, 7, 8]), position)
    assert SharedPrompts(shared.cache).plan(4) is None
    shared.prompts.forget([2])
    assert shared.prompts.plan(4) is None
    compare(torch.tensor([6, 7, 8, 9]), position + 1)
