import dataclasses

import numpy as np
import pytest

from nestling.engine.sampler import Rollout
from nestling.inner.train_settings import (
    Grouping,
    lora_for,
    loss_for,
    optim_for,
    rate_at,
    sampling_for,
)
from nestling.jobs.bounds import SMALL
from nestling.jobs.manifest import JobManifest, PrimeRl

NO_EFFECT = {
    "max_off_policy_steps": "the trainer is on policy, which every limit allows",
    "enable_thinking": "our chat markup has no thinking",
    "lora_dropout": "only 0 is accepted for small models",
    "sampler": "only standard is accepted for small models",
}
ELSEWHERE = {"max_steps", "batch_size", "group_size"}
"""Counts that the loop itself reads; the tests of whole jobs cover them."""

OTHER = {
    "lr": 2e-4, "temperature": 0.7, "optimizer": "sgd", "weight_decay": 0.3, "max_norm": 0.5,
    "betas1": 0.5, "betas2": 0.5, "momentum": 0.5, "mu": 0.5, "scheduler": "cosine",
    "warmup_steps": 2, "decay_steps": 3, "min_lr": 5e-5, "loss": "ipo", "kl_tau": 0.5,
    "adv_tau": 0.5, "dppo_mask_low": 0.5, "dppo_mask_high": 0.5, "ipo_threshold": 0.5,
    "algo": "max_rl", "length_penalty": True, "max_tokens": 20, "max_turns": 3, "seq_len": 200,
    "lora_rank": 4, "lora_alpha": 8.0,
}  # fmt: skip
BESIDE = {
    "momentum": {"optimizer": "sgd"},
    "mu": {"optimizer": "muon"},
    "warmup_steps": {"scheduler": "linear"},
    "decay_steps": {"scheduler": "linear"},
    "min_lr": {"scheduler": "cosine", "lr": 2e-4},
    "ipo_threshold": {"loss": "ipo"},
    "lora_alpha": {"lora_rank": 4},
}


def table(**settings: object) -> PrimeRl:
    return JobManifest.build("micro", **settings).prime_rl


def rollout(*, sampled: int, forced: int, turns: int) -> Rollout:
    flags = [False] * forced + [True] * sampled
    return Rollout(
        ids=list(range(len(flags))),
        sampled=flags,
        logprobs=[-1.0 if flag else 0.0 for flag in flags],
        prompt_len=1,
        num_turns=turns,
        stop="done",
    )


GROUPS = [
    [rollout(sampled=2, forced=4, turns=1), rollout(sampled=6, forced=8, turns=3)],
    [rollout(sampled=3, forced=4, turns=1), rollout(sampled=3, forced=4, turns=1)],
]
REWARDS = np.array([[1.0, 0.2], [0.5, 0.5]])


def effect(settings: PrimeRl) -> list[object]:
    """Everything the engine is told."""
    grouping = Grouping(settings)
    advantages = grouping.advantages(REWARDS, GROUPS)
    return [
        dataclasses.asdict(sampling_for(settings)),
        loss_for(settings),
        optim_for(settings),
        lora_for(settings),
        [rate_at(settings, step) for step in range(settings.max_steps)],
        advantages.tolist(),
    ]


@pytest.mark.parametrize("name", [key.name for key in SMALL.keys])
def test_every_key_of_the_table_reaches_the_engine(name: str) -> None:
    if name in NO_EFFECT or name in ELSEWHERE:
        return
    beside = BESIDE.get(name, {})
    assert effect(table(**beside, **{name: OTHER[name]})) != effect(table(**beside))


def test_group_without_signal_is_left_out_of_the_batch() -> None:
    grouping = Grouping(table())
    advantages = grouping.advantages(REWARDS, GROUPS)
    assert advantages.tolist() == [[pytest.approx(0.4), pytest.approx(-0.4)], [0.0, 0.0]]
    rows = grouping.train_rows(GROUPS, advantages)
    assert [row.advantage for row in rows] == [pytest.approx(0.4), pytest.approx(-0.4)]
    assert [row.sampled for row in rows] == [one.sampled for one in GROUPS[0]]


def test_length_penalty_favours_the_shorter_of_two_equal_rollouts() -> None:
    grouping = Grouping(table(length_penalty=True))
    short, long = grouping.advantages(np.array([[1.0, 1.0], [0.0, 0.0]]), GROUPS)[0]
    assert short > 0 > long
