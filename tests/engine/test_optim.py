import numpy as np
import pytest
import torch

from nestling.core.errors import ConfigError
from nestling.engine.advantage import (
    EmaBaseline,
    LengthPenalty,
    RolloutLengths,
    group_advantages,
    observation_weights,
)
from nestling.engine.optim import AdamW, Muon, Optimizer, Sgd, SignSgd, clip_norm, orthogonalise
from nestling.engine.schedule import learning_rate


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_updates_equal_torch_for_every_job(kind: str, nesterov: bool) -> None:
    flat, rates = draw(3, 50), torch.tensor([1e-2, 1e-3, 0.1])
    config = (
        AdamW(lr=0, weight_decay=0.1, betas=(0.8, 0.95))
        if kind == "adamw"
        else Sgd(lr=0, weight_decay=0.1, nesterov=nesterov)
    )
    peers, optims = [], []
    for j in range(3):
        peers.append(flat[j].clone().requires_grad_())
        lr = float(rates[j])
        optims.append(
            torch.optim.AdamW([peers[j]], lr=lr, weight_decay=0.1, betas=(0.8, 0.95))
            if kind == "adamw"
            else torch.optim.SGD(
                [peers[j]], lr=lr, weight_decay=0.1, momentum=0.9, nesterov=nesterov
            )
        )
    ours = Optimizer(config, flat)
    for step in range(5):
        grad = draw(3, 50, seed=step + 1)
        ours.step(grad, rates)
        for j in range(3):
            peers[j].grad = grad[j].clone()
            optims[j].step()
    for j in range(3):
        assert (flat[j] - peers[j]).abs().max() < 2e-6


def test_sign_sgd_moves_by_the_rate() -> None:
    flat = torch.zeros(1, 4)
    grad = torch.tensor([[3.0, -0.1, 0.0, 5.0]])
    Optimizer(SignSgd(lr=0, weight_decay=0), flat).step(grad, torch.tensor([0.5]))
    assert flat.tolist() == [[-0.5, 0.5, 0.0, -0.5]]


def test_muon_orthogonalises_matrices_and_leaves_the_rest_to_adamw() -> None:
    flat, grad = torch.zeros(2, 20), draw(2, 20)
    config = Muon(lr=0, weight_decay=0)
    Optimizer(config, flat, [(4, 3, 4)]).step(grad, torch.tensor([0.1, 0.2]))
    rest = torch.zeros(2, 20)
    Optimizer(AdamW(lr=0, weight_decay=0, betas=config.betas), rest).step(
        grad, torch.tensor([0.1, 0.2])
    )
    assert torch.allclose(flat[:, :4], rest[:, :4])
    assert torch.allclose(flat[:, 16:], rest[:, 16:])
    for j, rate in enumerate((0.1, 0.2)):
        moved = -flat[j, 4:16].view(3, 4) / (rate * 0.2 * 4**0.5)
        singular = torch.linalg.svdvals(moved)
        assert 0.6 < singular.min() < singular.max() < 1.3


def test_orthogonalise_keeps_directions_and_shapes() -> None:
    for shape in ((2, 6, 3), (2, 3, 6)):
        matrix = draw(*shape)
        result = orthogonalise(matrix)
        assert result.shape == shape
        assert (result * matrix).sum() > 0


def test_inactive_jobs_are_untouched_and_state_resumes() -> None:
    flat = draw(3, 30)
    before = flat.clone()
    ours = Optimizer(Muon(lr=0), flat, [(5, 4, 5)])
    rates = torch.full((3,), 0.1)
    ours.step(draw(3, 30, seed=1), rates, torch.tensor([True, False, True]))
    assert torch.equal(flat[1], before[1])
    assert not torch.equal(flat[0], before[0])
    other_flat = flat.clone()
    other = Optimizer(Muon(lr=0), other_flat, [(5, 4, 5)])
    other.load_state_dict(ours.state_dict())
    for one in (ours, other):
        one.step(draw(3, 30, seed=2), rates)
    assert torch.equal(flat, other_flat)
    with pytest.raises(ConfigError, match="state"):
        Optimizer(AdamW(lr=0), draw(2, 3)).load_state_dict(ours.state_dict())


def test_norms_are_clipped_per_job() -> None:
    grad = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    norms = clip_norm(grad, 1.0)
    assert torch.allclose(norms, torch.tensor([5.0, 0.5]))
    assert torch.allclose(grad, torch.tensor([[0.6, 0.8], [0.3, 0.4]]), atol=1e-5)
    assert torch.equal(clip_norm(grad * 10, None), torch.linalg.vector_norm(grad * 10, dim=1))


@pytest.mark.parametrize(
    ("warmup", "decay", "low"), [(3, 4, 0.0), (3, 4, 1e-4), (0, 5, 0.0), (4, 0, 1e-5), (2, 8, 0.0)]
)
def test_linear_schedule_equals_torch(warmup: int, decay: int, low: float) -> None:
    from torch.optim.lr_scheduler import LinearLR, SequentialLR

    lr, total = 1e-3, 10
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    floor = low / lr if low > 0 else 1e-8
    phases, ends = [], []
    if warmup:
        phases.append(LinearLR(optimizer, floor, 1.0, warmup))
        ends.append(warmup)
    if decay:
        phases.append(LinearLR(optimizer, 1.0, 1.0, total - decay - warmup))
        phases.append(LinearLR(optimizer, 1.0, floor, decay - 1))
        ends.append(total - decay)
    peer = phases[0] if len(phases) == 1 else SequentialLR(optimizer, phases, milestones=ends)
    for step in range(total):
        ours = learning_rate(
            step, lr=lr, scheduler="linear", warmup_steps=warmup, max_steps=total,
            decay_steps=decay, min_lr=low,
        )  # fmt: skip
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6, abs=1e-12)
        optimizer.step()
        peer.step()


def test_cosine_schedule_climbs_and_falls() -> None:
    def rate(step: int) -> float:
        return learning_rate(
            step, lr=1.0, scheduler="cosine", warmup_steps=2, max_steps=10, min_lr=0.1
        )

    assert [rate(0), rate(1), rate(2), rate(6), rate(10)] == pytest.approx(
        [0.1, 0.55, 1.0, 0.55, 0.1]
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduler": "linear", "warmup_steps": 0, "decay_steps": 0},
        {"scheduler": "linear", "warmup_steps": 5, "decay_steps": 6, "max_steps": 10},
        {"scheduler": "cosine", "warmup_steps": 10, "max_steps": 10},
        {"scheduler": "cosine"},
        {"scheduler": "step"},
    ],
)
def test_impossible_schedules_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        learning_rate(0, lr=1.0, **settings)


REWARDS = np.array([[1.0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5], [0, 0, 0, 0]])


def test_grpo_centres_and_constant_groups_are_exact_zeros() -> None:
    plain = group_advantages(REWARDS)
    assert plain[0].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert not plain[1:].any()
    scaled = group_advantages(REWARDS, std_normalise=True)
    assert scaled[0] == pytest.approx([1, -1, -1, 1], abs=1e-3)
    assert not scaled[1:].any()
    assert not group_advantages(np.full((1, 3), 0.1)).any()
    assert np.array_equal(group_advantages(REWARDS, "echo"), plain)


def test_max_rl_divides_by_the_group_mean() -> None:
    rewards = np.array([[1.0, 0, 0, 0], [0, 0, 0, 0], [-1, 0, 0, 0]])
    assert group_advantages(rewards, "max_rl").tolist() == [[3, -1, -1, -1], [0] * 4, [0] * 4]


def test_rae_scores_before_it_moves_the_average() -> None:
    baseline = EmaBaseline(decay=0.5)
    assert group_advantages([[1.0, 1.0], [0.0, 1.0]], "rae", baseline=baseline).tolist() == [
        [1.0, 0.5],
        [-0.75, 0.625],
    ]
    assert baseline.value == pytest.approx(0.6875)
    with pytest.raises(ConfigError, match="rae"):
        group_advantages(REWARDS, "rae")


def test_length_penalty_prefers_the_short_success() -> None:
    lengths = RolloutLengths(output_tokens=[[10, 20]], input_tokens=[[30, 30]], turns=[[1, 2]])
    shaped = group_advantages([[1.0, 1.0]], length_penalty=LengthPenalty(), lengths=lengths)
    # 1 - 1 * (.25 * .5 + .1 + .1 * .5) against 1 - 1 * (.25 + .1 + .1)
    assert shaped[0] == pytest.approx([0.0875, -0.0875])
    failing = group_advantages([[0.0, 0.0]], length_penalty=LengthPenalty(), lengths=lengths)
    assert not failing.any()
    with pytest.raises(ConfigError, match="max_rl"):
        group_advantages(REWARDS, "max_rl", length_penalty=LengthPenalty(), lengths=lengths)
    with pytest.raises(ConfigError, match="lengths"):
        group_advantages(REWARDS, length_penalty=LengthPenalty())


def test_bad_rewards_and_algorithms_are_refused() -> None:
    for bad in ([1.0, 2.0], [[float("nan"), 1.0]]):
        with pytest.raises(ConfigError, match="finite"):
            group_advantages(bad)
    with pytest.raises(ConfigError, match="ppo"):
        group_advantages(REWARDS, "ppo")


def test_observation_weights_start_after_the_first_turn() -> None:
    assert observation_weights([False, False, True, False, True, False], 0.1) == [
        0, 0, 0, 0.1, 0, 0.1,
    ]  # fmt: skip


def test_fused_adamw_is_the_same_update() -> None:
    rates, config = torch.tensor([1e-2, 1e-3, 0.1]), AdamW(lr=0, weight_decay=0.1)
    plain, fused = draw(3, 50), draw(3, 50)
    one, other = Optimizer(config, plain), Optimizer(config, fused)
    for step in range(5):
        grad = draw(3, 50, seed=step + 1)
        one.step(grad, rates)
        other._steps += 1
        other.adamw_fused(grad, rates[:, None])
    assert (plain - fused).abs().max() < 1e-5
    assert not torch.equal(plain, draw(3, 50))
