import pytest
import torch
from torch import Tensor

from nestling.engine.batching import TrainRow, micro_batches
from nestling.engine.learn import target_logprobs
from nestling.engine.lora import LoraConfig, LoraWeights
from nestling.engine.model import Model
from nestling.engine.packing import packed_batches
from nestling.engine.params import bind
from nestling.engine.weights import split_views

from .conftest import make_model


def row(prompt: int, own: int, seed: int, *, gap: bool = False, prompt_seed: int = 0) -> TrainRow:
    """Tokens of a prompt and of what follows; with `gap`, some of the latter are given."""
    given = torch.randint(5, 18, (prompt,), generator=torch.Generator().manual_seed(prompt_seed))
    more = torch.randint(5, 18, (own,), generator=torch.Generator().manual_seed(seed))
    sampled = [not (gap and 2 <= i < 5) for i in range(own)]
    return TrainRow(
        ids=[*given.tolist(), *more.tolist()],
        sampled=[False] * prompt + sampled,
        logprobs=[-0.5 - 0.01 * seed] * (prompt + own),
        advantage=seed % 5 - 2.0,
    )


def branched(*parts: tuple[int, int]) -> TrainRow:
    """A prompt and what follows, each (length, seed) of its own; the last part but one is given."""
    ids: list[int] = []
    for length, seed in parts:
        generator = torch.Generator().manual_seed(100 + seed)
        ids += torch.randint(5, 18, (length,), generator=generator).tolist()
    prompt, given = parts[0][0], len(ids) - parts[-1][0]
    count = len(ids)
    return TrainRow(
        ids=ids,
        sampled=[prompt <= i < given - 2 or i >= given for i in range(count)],
        logprobs=[-0.5 - 0.01 * parts[-1][1]] * count,
        advantage=parts[-1][1] % 5 - 2.0,
    )


TREE = [
    *(branched((12, 1), (6, turn), (4, end)) for turn in (2, 3) for end in (4, 5, 6)),
    *(branched((12, 1), (6, 2), (4, 4)) for _ in range(2)),  # said by several rows
    branched((12, 1), (6, 2), (1, 4)),  # ends where others go on
    branched((12, 1), (6, 2), (7, 8)),
]


ROWS = [
    *(row(12, 9, seed) for seed in range(3)),  # one length
    *(row(12, own, 10 + own, gap=True) for own in (1, 7, 7, 14)),  # of the same prompt
    *(row(9, 5 + seed, seed, prompt_seed=1) for seed in range(3)),
    row(12, 6, 40, prompt_seed=2),  # alone
    *(row(3, 6, 50 + seed, prompt_seed=3) for seed in range(2)),  # too short a beginning
    row(1, 1, 60),
    *TREE,
]


def surrogate(logp: Tensor, batch: object) -> Tensor:
    ratio = (logp - batch.old_logp).exp()  # type: ignore[attr-defined]
    return (ratio * batch.advantage * batch.action).sum()  # type: ignore[attr-defined]


def gradient(model: Model, batches: list[object]) -> tuple[float, Tensor]:
    """Sum of a policy loss over batches, and its gradient."""
    flat = model.weights.flat if model.lora is None else model.lora.flat
    leaf = flat.detach().clone().requires_grad_()
    if model.lora is None:
        params = bind(model.config, split_views(model.config, leaf))
    else:
        adapters = model.lora.adapters(model.lora.views(leaf))
        params = bind(model.config, model.weights.views(), adapters=adapters)
    total = torch.zeros((), dtype=flat.dtype)
    for batch in batches:
        total = total + surrogate(target_logprobs(params, model, batch), batch)  # type: ignore[arg-type]
    return float(total.detach()), torch.autograd.grad(total, leaf)[0]


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_kv_heads": 4}, {"qk_norm": True}, {"attention_bias": True, "tie_embeddings": False}],
)
@pytest.mark.parametrize("budget", [10, 60, 10_000])
def test_gradient_is_that_of_padded_rows(changes: dict[str, object], budget: int) -> None:
    model = make_model(**changes)
    model.weights.flat = model.weights.flat.double()
    loss, grad = gradient(model, list(packed_batches(ROWS, budget)))
    plain_loss, plain_grad = gradient(model, list(micro_batches([ROWS], 400)))
    assert loss == pytest.approx(plain_loss, abs=1e-6)
    assert (grad - plain_grad).abs().max() < 1e-6


def test_gradient_of_adapters() -> None:
    model = make_model()
    generator = torch.Generator().manual_seed(1)
    model.lora = LoraWeights.init(model.config, LoraConfig(), 1, generator, model.device)
    with torch.no_grad():
        model.lora.flat.add_(torch.randn(model.lora.flat.shape, generator=generator) * 0.05)
    loss, grad = gradient(model, list(packed_batches(ROWS, 100)))
    plain_loss, plain_grad = gradient(model, list(micro_batches([ROWS], 400)))
    assert loss == pytest.approx(plain_loss, abs=1e-4)
    assert (grad - plain_grad).abs().max() < 1e-4


def test_shared_beginning_is_computed_once() -> None:
    group = [row(20, 4, seed) for seed in range(6)]
    (batch,) = packed_batches(group, 1000)
    assert len(batch.ids) == 20 + 6 * 3
    assert batch.pick.shape == (1, 24)
    assert [(one.prefix, one.runs) for one in batch.groups] == [(20, ((6, 3),))]


@pytest.mark.parametrize("budget", [1, 25, 50, 1000])
def test_every_prediction_is_in_some_batch_once(budget: int) -> None:
    batches = packed_batches(ROWS, budget)
    found = sorted(
        (int(target), float(old), float(advantage))
        for batch in batches
        for target, old, advantage in zip(
            batch.target[0], batch.old_logp[0], batch.advantage[0], strict=True
        )
    )
    (plain,) = micro_batches([ROWS], 10_000)
    expected = sorted(
        (int(target), float(old), float(advantage))
        for target, old, advantage in zip(
            plain.target[0], plain.old_logp[0], plain.advantage[0], strict=True
        )
    )
    assert found == expected
    for batch in batches:
        shared = sum(one.prefix for one in batch.groups)
        one_row = len(batch.groups) == 1 and sum(count for count, _ in batch.groups[0].runs) <= 1
        assert len(batch.ids) <= budget or one_row or shared == len(batch.ids)


def test_what_a_group_says_alike_is_computed_once() -> None:
    (batch,) = packed_batches(TREE, 1000)
    beginnings = {tuple(one.ids[: i + 1]) for one in TREE for i in range(len(one.ids) - 1)}
    assert len(batch.ids) == len(beginnings)
    assert batch.groups[0].mask is not None
    assert len(batch.predicting) < batch.pick.shape[1] == sum(sum(one.sampled) for one in TREE)
    assert len(batch.predicting.unique()) == len(batch.predicting)


def test_a_tree_that_saves_little_is_none() -> None:
    group = [row(60, 60, seed) for seed in range(4)]
    (batch,) = packed_batches(group, 1000)
    assert batch.groups[0].mask is None


def test_no_rows() -> None:
    assert packed_batches([], 100) == []
