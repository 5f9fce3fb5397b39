import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from nestling.core.errors import ConfigError, ModelError
from nestling.engine.advantage import group_advantages, observation_weights
from nestling.engine.batching import micro_batches
from nestling.engine.learn import (
    AdamW,
    Dppo,
    ImportanceSampling,
    Ipo,
    LoraConfig,
    PolicyTrainer,
    PpoClip,
    Sgd,
    SupervisedTrainer,
    TrainRow,
)
from nestling.engine.lora import LoraWeights, load_adapter, save_adapter
from nestling.engine.losses import reference_kl, token_loss
from nestling.engine.model import Model, forward, logits
from nestling.engine.params import bind
from nestling.engine.sampler import SamplingParams, play
from nestling.engine.weights import split_views

from .conftest import TOKENIZER, make_model

LOSSES = [
    ImportanceSampling(),
    PpoClip(),
    PpoClip(clip_low=0.1, clip_high=0.3),
    Dppo(),
    Dppo(dppo_mask_low=0.05, dppo_mask_high=0.1, adv_tau=0.5, kl_tau=0.1),
    Ipo(),
    Ipo(ipo_threshold=0.02, kl_tau=0.2),
]


def some_rows(count: int = 9, seed: int = 0) -> list[TrainRow]:
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        length = int(rng.integers(5, 24))
        sampled = [False, *(rng.random(length - 1) < 0.5)]
        sampled[2] = True
        rows.append(
            TrainRow(
                ids=rng.integers(3, 260, length).tolist(),
                sampled=sampled,
                logprobs=(rng.normal(-5.5, 0.3, length) * sampled).tolist(),
                advantage=float(rng.normal()) if i % 4 else 0.0,
            )
        )
    return rows


def naive_token_loss(config: object, logp: float, old: float, adv: float) -> float:
    """The formulas once more, with Python floats."""
    ratio = math.exp(logp - old)
    if isinstance(config, ImportanceSampling):
        return -ratio * adv
    if isinstance(config, PpoClip):
        clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        return -min(ratio * adv, clipped * adv)
    moved = math.exp(logp) - math.exp(old)
    if isinstance(config, Dppo):
        keep = not (moved > config.dppo_mask_high if adv > 0 else moved < -config.dppo_mask_low)
    else:
        keep = abs(moved) <= config.ipo_threshold
    return -keep * config.adv_tau * adv * ratio + config.kl_tau * (logp - old) ** 2


@pytest.mark.parametrize("config", LOSSES, ids=repr)
def test_token_losses_equal_the_naive_formulas(config: object) -> None:
    rng = np.random.default_rng(1)
    logp, old = -rng.exponential(1, (2, 300)), -rng.exponential(1, (2, 300))
    adv = rng.normal(0, 1, (2, 300))
    loss, dropped = token_loss(config, *map(torch.from_numpy, (logp, old, adv)))
    expected = np.vectorize(lambda a, b, c: naive_token_loss(config, a, b, c))(logp, old, adv)
    assert np.allclose(loss.numpy(), expected)
    assert dropped.any() != isinstance(config, ImportanceSampling)


@pytest.mark.parametrize("config", LOSSES, ids=repr)
def test_loss_gradients_match_differences(config: object) -> None:
    generator = torch.Generator().manual_seed(2)
    old = -torch.rand(1, 40, dtype=torch.float64, generator=generator) * 2
    logp = (old + torch.randn(1, 40, dtype=torch.float64, generator=generator) * 0.3).clamp(max=0)
    adv = torch.randn(1, 40, dtype=torch.float64, generator=generator)
    assert torch.autograd.gradcheck(
        lambda x: token_loss(config, x, old, adv)[0].sum(), (logp.requires_grad_(),)
    )
    assert torch.autograd.gradcheck(lambda x: reference_kl(x, old).sum(), (logp,))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("config", LOSSES[3:5], ids=repr)
def test_batch_loss_and_gradient_equal_a_naive_loop(config: object, temperature: float) -> None:
    model, rows = make_model(), some_rows()
    reference = make_model(seed=5).weights
    trainer = PolicyTrainer(
        model, config, Sgd(lr=1.0, momentum=0, nesterov=False, weight_decay=0, max_norm=None),
        reference=reference, kl_coef=0.3, token_budget=60,
    )  # fmt: skip
    flat = model.weights.flat.clone().requires_grad_()
    params = bind(model.config, split_views(model.config, flat))
    fixed = bind(model.config, reference.views())
    total, count = torch.zeros(()), 0
    for row in rows:
        if row.advantage == 0:
            continue
        ids = torch.tensor([[row.ids]])

        def score(weights: object, ids: torch.Tensor = ids) -> torch.Tensor:
            hidden = forward(weights, model.config, ids)[0]
            return (logits(weights, hidden)[0] / temperature).log_softmax(-1)

        ours, theirs = score(params), score(fixed).detach()
        for at, flag in enumerate(row.sampled):
            if flag:
                one, ref = ours[at - 1, row.ids[at]], theirs[at - 1, row.ids[at]]
                old = torch.tensor(row.logprobs[at])
                adv = torch.tensor(row.advantage)
                total = total + token_loss(config, one, old, adv)[0]
                total = total + 0.3 * ((ref - one).exp() - (ref - one) - 1)
                count += 1
    (total / count).backward()
    stats = trainer.forward_backward(rows, temperature)
    assert stats.num_tokens == count
    assert stats.loss == pytest.approx(float(total.detach() / count), abs=1e-4)
    before = model.weights.flat.clone()
    step = trainer.optim_step()
    assert (before - model.weights.flat - flat.grad).abs().max() < 1e-5
    assert step.grad_norm == pytest.approx(float(flat.grad.norm()), rel=1e-4)


def test_micro_batches_and_padding_never_change_the_gradient() -> None:
    grads = []
    for budget in (1, 50, 10_000):
        model = make_model()
        trainer = PolicyTrainer(model, ImportanceSampling(), AdamW(lr=1e-3), token_budget=budget)
        trainer.forward_backward(some_rows(20))
        grads.append(trainer._trained.grad.clone())
    for other in grads[1:]:
        assert (grads[0] - other).abs().max() < 1e-5


def test_a_stack_trains_every_job_as_it_would_alone() -> None:
    stack = make_model(num_jobs=3)
    rows = [some_rows(7, 1), some_rows(3, 2), []]
    temperatures, rates = [1.0, 0.8, 1.0], [0.1, 0.03, 0.1]
    start = stack.weights.clone()
    trainer = PolicyTrainer(stack, Dppo(), Sgd(lr=0), token_budget=200)
    for _ in range(2):
        together = trainer.forward_backward_stacked(rows, temperatures)
        steps = trainer.optim_step_stacked(rates)
    for j in range(3):
        alone = Model(start.config, start.job(j).clone(), TOKENIZER)
        single = PolicyTrainer(alone, Dppo(), Sgd(lr=0))
        for _ in range(2):
            stats = single.forward_backward(rows[j], temperatures[j])
            step = single.optim_step(rates[j])
        assert stats.loss == pytest.approx(together[j].loss, abs=1e-4)
        assert step.updated == steps[j].updated == (j < 2)
        assert (alone.weights.flat[0] - stack.weights.flat[j]).abs().max() < 1e-5
    assert torch.equal(stack.weights.flat[2], start.flat[2])


def test_rows_without_advantage_leave_the_weights_alone() -> None:
    model = make_model()
    before = model.weights.content_hash()
    trainer = PolicyTrainer(model, Dppo(), AdamW(lr=1e-2))
    rows = [dataclasses.replace(row, advantage=0.0) for row in some_rows()]
    assert trainer.forward_backward(rows).num_rows == 0
    assert not trainer.optim_step().updated
    assert model.weights.content_hash() == before


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, dropout=0.2)])
def test_same_seed_same_result_and_exact_resume(lora: LoraConfig | None) -> None:
    def run(stop: int | None) -> torch.Tensor:
        model = make_model()
        trainer = PolicyTrainer(model, PpoClip(), AdamW(lr=1e-2), lora=lora, seed=3)
        for i in range(4):
            if i == stop:
                state = trainer.state_dict()
                model = make_model()
                trainer = PolicyTrainer(model, PpoClip(), AdamW(lr=1e-2), lora=lora, seed=4)
                trainer.load_state_dict(state)
            trainer.forward_backward(some_rows(6, i))
            trainer.optim_step()
        return (model.weights if model.lora is None else model.lora).flat

    whole = run(None)
    assert torch.equal(whole, run(None))
    assert torch.equal(whole, run(2))


def test_cross_entropy_weights_train_observations() -> None:
    model = make_model()
    sampled = [False, True, False, False, True, False]
    row = TrainRow(
        ids=[5, 6, 7, 8, 9, 10], sampled=sampled, logprobs=[-1.0] * 6,
        ce_weights=observation_weights(sampled, 0.1),
    )  # fmt: skip
    trainer = PolicyTrainer(model, ImportanceSampling(), AdamW(lr=1e-2))
    first = trainer.forward_backward([row])
    trainer.optim_step()
    params = make_model().params()
    with torch.no_grad():
        hidden = forward(params, model.config, torch.tensor([[row.ids]]))[0]
        logp = logits(params, hidden)[0].log_softmax(-1)
    expected = -0.1 * sum(float(logp[at - 1, row.ids[at]]) for at in (2, 3, 5)) / 3
    assert first.ce_loss == pytest.approx(expected, abs=1e-4)
    assert trainer.forward_backward([row]).ce_loss < first.ce_loss


@pytest.mark.long
def test_supervised_training_learns_and_repeats() -> None:
    def run() -> list[float]:
        model = make_model()
        trainer = SupervisedTrainer(model, AdamW(lr=1e-2), token_budget=300)
        rows = some_rows(12)
        return [trainer.step(rows, lr=5e-3) for _ in range(30)] + [trainer.evaluate(rows)]

    losses = run()
    assert losses[-1] < 0.5 * losses[0]
    assert losses == run()


@pytest.mark.long
def test_policy_training_beats_chance() -> None:
    """Answer with the token that the prompt names, out of eight; the reward is all it is told."""
    model = make_model(num_layers=1)
    answers, prompts = list(range(20, 28)), [[30, 20 + i] for i in range(8)]
    params = SamplingParams(max_turn_tokens=1, max_total_tokens=3, max_turns=1)
    trainer = PolicyTrainer(model, PpoClip(), AdamW(lr=1e-2, weight_decay=0))
    SupervisedTrainer(model, AdamW(lr=1e-2)).step(  # a push towards the eight, not to the right one
        [TrainRow(ids=[30, p, a], sampled=[False, False, True]) for p in answers for a in answers]
    )

    def play_all(seed: int) -> tuple[list, np.ndarray]:
        batch = [prompt for prompt in prompts for _ in range(16)]
        seeds = range(seed * 128, seed * 128 + 128)
        rollouts = play(model, batch, seeds, params, lambda turns: [None] * len(turns))
        return rollouts, np.array([float(r.ids[2] == r.ids[1]) for r in rollouts]).reshape(8, 16)

    before = play_all(1000)[1].mean()
    for step in range(40):
        rollouts, rewards = play_all(step)
        advantages = group_advantages(rewards, std_normalise=True).reshape(-1)
        stats = trainer.forward_backward(
            [
                TrainRow(ids=r.ids, sampled=r.sampled, logprobs=r.logprobs, advantage=float(a))
                for r, a in zip(rollouts, advantages, strict=True)
            ]
        )
        assert stats.max_abs_logp_diff < 1e-4  # the sampler is the learner's policy
        assert stats.mean_abs_ratio_minus_1 < 1e-5
        trainer.optim_step()
    after = play_all(1001)[1].mean()
    assert before < 0.2
    assert after > 0.5


def test_lora_starts_as_the_base_and_leaves_it_alone(tmp_path: Path) -> None:
    model = make_model(num_jobs=1)
    base = model.weights.content_hash()
    config = LoraConfig(rank=3, alpha=6, target_modules=("q_proj", "v_proj", "down_proj"))
    trainer = PolicyTrainer(model, ImportanceSampling(), AdamW(lr=1e-2), lora=config, kl_coef=0.1)
    assert model.lora is not None
    assert torch.equal(model.lora.merged(model.weights).flat, model.weights.flat)
    rows = some_rows()
    first = trainer.forward_backward(rows)
    assert first.reference_kl == pytest.approx(0, abs=1e-6)
    trainer.optim_step()
    assert trainer.forward_backward(rows).loss < first.loss
    assert model.weights.content_hash() == base

    ids = torch.tensor([[row.ids[:5] for row in rows]])
    merged = bind(model.config, model.lora.merged(model.weights).views())
    with torch.no_grad():
        one = forward(model.params(), model.config, ids)
        assert (one - forward(merged, model.config, ids)).abs().max() < 1e-5
    save_adapter(tmp_path, model.lora)
    back = load_adapter(tmp_path, model.config)
    assert torch.equal(back.flat, model.lora.flat)
    with pytest.raises(ModelError):
        load_adapter(tmp_path, make_model(hidden_size=64).config)


def test_adapters_of_many_jobs_share_one_base() -> None:
    model = make_model()
    generator = torch.Generator().manual_seed(0)
    model.lora = LoraWeights.init(model.config, LoraConfig(rank=2), 3, generator)
    model.lora.flat.normal_(0, 0.1, generator=generator)
    ids = torch.randint(3, 200, (3, 2, 7), generator=generator)
    merged = bind(model.config, model.lora.merged(model.weights).views())
    with torch.no_grad():
        shared = forward(model.params(), model.config, ids)
        assert (shared - forward(merged, model.config, ids)).abs().max() < 1e-4
    trainer = PolicyTrainer(model, ImportanceSampling(), AdamW(lr=1e-2))
    trainer.forward_backward_stacked([some_rows(), [], some_rows(4, 1)], [1, 1, 1])
    assert [step.updated for step in trainer.optim_step_stacked()] == [True, False, True]


def test_bad_rows_and_settings_are_explained() -> None:
    model = make_model()
    trainer = PolicyTrainer(model, Dppo(), AdamW(lr=1e-3))
    row = TrainRow(ids=[5, 6], sampled=[False, True], logprobs=[0, -1.0], advantage=1.0)
    with pytest.raises(ConfigError, match="first token"):
        trainer.forward_backward([dataclasses.replace(row, sampled=[True, True])])
    with pytest.raises(ConfigError, match="logprobs"):
        trainer.forward_backward([dataclasses.replace(row, logprobs=[0.0])])
    with pytest.raises(ConfigError, match="temperature"):
        trainer.forward_backward([row], 0.0)
    with pytest.raises(ConfigError, match="reference"):
        PolicyTrainer(model, Dppo(), AdamW(lr=1e-3), kl_coef=0.1)


def test_micro_batches_cut_what_is_never_predicted() -> None:
    rows = [
        TrainRow(ids=[5, 6, 7, 8, 9], sampled=[False, True, False, False, False]),
        TrainRow(ids=[5, 6], sampled=[False, False]),
    ]
    (batch,) = micro_batches([rows], 100)
    assert batch.ids.tolist() == [[[5]]]
    assert (batch.pick.tolist(), batch.target.tolist()) == ([[0]], [[6]])
