import pytest
import torch

from nestling.engine.fused import picked_logp, rms_norm, split_rotary, swiglu
from nestling.engine.model import KVCache, decode, extend, forward, logits
from nestling.engine.params import bind
from nestling.engine.weights import Weights, split_views

from .conftest import GEMMA, make_config

LAYOUTS = [
    {"num_kv_heads": 4},
    {},
    {"attention_bias": True, "tie_embeddings": False},
    {"qk_norm": True},
    GEMMA,
]


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 260, shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("changes", LAYOUTS)
@pytest.mark.parametrize("jobs", [1, 3])
def test_extend_and_decode_agree_with_forward(changes: dict[str, object], jobs: int) -> None:
    config = make_config(**changes)
    weights = Weights.init(config, jobs)
    params = bind(config, weights.views())
    ids = random_ids(jobs, 4, 21)
    with torch.no_grad():
        full = logits(params, forward(params, config, ids).flatten(1, 2)).view(jobs, 4, 21, -1)
    cache = KVCache(config, jobs * 4, 32)
    rows = torch.arange(jobs * 4)
    extend(params, config, ids[:, :, :7], torch.zeros(jobs, 4, dtype=torch.long), cache, rows)
    # ragged: row 0 of every job goes back two positions and feeds them again with the next ones
    start = torch.tensor([[5, 7, 7, 7]]).expand(jobs, 4)
    span = start[:, :, None] + torch.arange(6)
    extend(params, config, ids.gather(2, span), start, cache, rows)
    for step in range(11, 21):
        position = torch.full((jobs, 4), step)
        out = decode(params, config, ids[:, :, step], position, cache, step + 1)
        assert (out - full[:, :, step]).abs().max() < 1e-4


def test_a_stack_equals_its_jobs_alone() -> None:
    config = make_config(attention_bias=True)
    weights = Weights.init(config, 3)
    ids = random_ids(3, 2, 9)
    with torch.no_grad():
        stacked = forward(bind(config, weights.views()), config, ids)
        for j in range(3):
            alone = forward(bind(config, weights.job(j).views()), config, ids[j : j + 1])
            assert (stacked[j] - alone[0]).abs().max() < 1e-5


def test_padding_on_the_right_changes_nothing() -> None:
    config = make_config()
    params = bind(config, Weights.init(config).views())
    ids = random_ids(1, 2, 12)
    padded = torch.cat((ids, torch.zeros(1, 2, 20, dtype=torch.long)), 2)
    with torch.no_grad():
        short, long = forward(params, config, ids), forward(params, config, padded)
    assert (short - long[:, :, :12]).abs().max() < 1e-5


@pytest.mark.long
def test_hand_written_backward_passes_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    angle = torch.randn(5, 1, 3, dtype=torch.float64, generator=generator)
    assert torch.autograd.gradcheck(
        lambda x: split_rotary(x, angle.cos(), angle.sin(), 4, 2), (draw(2, 5, 8, 6),)
    )
    for jobs in (1, 2):
        assert torch.autograd.gradcheck(
            lambda x, w: rms_norm(x, w, 1e-6), (draw(2, 3, 4), draw(jobs, 1, 4))
        )
    assert torch.autograd.gradcheck(swiglu, (draw(2, 3, 8),))
    row, token = torch.tensor([0, 3, 3, 1, 3]), torch.tensor([4, 0, 2, 5, 0])  # row 2: never
    assert torch.autograd.gradcheck(lambda x: picked_logp(x, row, token), (draw(4, 6),))


@pytest.mark.parametrize("changes", LAYOUTS)
def test_gradients_of_the_whole_model_match_differences(changes: dict[str, object]) -> None:
    config = make_config(hidden_size=8, intermediate_size=6, num_layers=1, vocab_size=7, **changes)
    flat = Weights.init(config, 2).flat.double().requires_grad_()
    ids = random_ids(2, 2, 4) % 7

    def loss(values: torch.Tensor) -> torch.Tensor:
        params = bind(config, split_views(config, values))
        return logits(params, forward(params, config, ids).flatten(1, 2)).square().mean()

    (grad,) = torch.autograd.grad(loss(flat), flat)
    direction = torch.randn(
        flat.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    eps = 1e-6
    with torch.no_grad():
        slope = (loss(flat + eps * direction) - loss(flat - eps * direction)) / (2 * eps)
    assert torch.allclose((grad * direction).sum(), slope, rtol=2e-5)  # tables are float32-exact
