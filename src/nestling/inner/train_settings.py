"""A job's `[prime_rl]` table in the words of our engine: one place where every key is honoured.

Axes: P prompt (group), G rollout of one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nestling.engine.advantage import (
    EmaBaseline,
    LengthPenalty,
    RolloutLengths,
    group_advantages,
    observation_weights,
)
from nestling.engine.learn import (
    AdamW,
    Dppo,
    Ipo,
    LoraConfig,
    Muon,
    PolicyTrainer,
    Sgd,
    SignSgd,
    TrainRow,
)
from nestling.engine.model import Model
from nestling.engine.sampler import Rollout, SamplingParams
from nestling.engine.schedule import learning_rate
from nestling.jobs.manifest import PrimeRl

__all__ = [
    "Grouping",
    "learner_for",
    "lora_for",
    "loss_for",
    "optim_for",
    "rate_at",
    "sampling_for",
]

Rollouts = Sequence[Sequence[Rollout]]
"""[P][G]."""


def sampling_for(table: PrimeRl) -> SamplingParams:
    """`temperature`, `max_tokens`, `seq_len`, `max_turns`."""
    return SamplingParams(
        temperature=table.temperature,
        max_turn_tokens=table.max_tokens,
        max_total_tokens=table.seq_len,
        max_turns=table.max_turns,
    )


def learner_for(table: PrimeRl, model: Model, *, seed: int) -> PolicyTrainer:
    """The trainer of `model`'s weights, or of adapters put into it when `lora_rank` is above 0."""
    return PolicyTrainer(model, loss_for(table), optim_for(table), lora=lora_for(table), seed=seed)


def loss_for(table: PrimeRl) -> Dppo | Ipo:
    """`loss` with its thresholds, `adv_tau` and `kl_tau`."""
    if table.loss == "ipo":
        return Ipo(ipo_threshold=table.ipo_threshold, adv_tau=table.adv_tau, kl_tau=table.kl_tau)
    return Dppo(
        dppo_mask_low=table.dppo_mask_low,
        dppo_mask_high=table.dppo_mask_high,
        adv_tau=table.adv_tau,
        kl_tau=table.kl_tau,
    )


def optim_for(table: PrimeRl) -> AdamW | Sgd | Muon | SignSgd:
    """`optimizer` with `weight_decay`, `max_norm` and its own keys."""
    lr, decay, norm = table.lr, table.weight_decay, table.max_norm
    betas = (table.betas1, table.betas2)
    if table.optimizer == "adamw":
        return AdamW(lr=lr, weight_decay=decay, max_norm=norm, betas=betas)
    if table.optimizer == "sgd":
        return Sgd(lr=lr, weight_decay=decay, max_norm=norm, momentum=table.momentum)
    if table.optimizer == "muon":
        return Muon(lr=lr, weight_decay=decay, max_norm=norm, momentum=table.mu, betas=betas)
    return SignSgd(lr=lr, weight_decay=decay, max_norm=norm)


def lora_for(table: PrimeRl) -> LoraConfig | None:
    """`lora_rank`, `lora_alpha`, `lora_dropout`; None trains all weights."""
    if table.lora_rank == 0:
        return None
    return LoraConfig(rank=table.lora_rank, alpha=table.lora_alpha, dropout=table.lora_dropout)


def rate_at(table: PrimeRl, step: int) -> float:
    """Learning rate of training step `step`, counted from 0."""
    return learning_rate(
        step,
        lr=table.lr,
        scheduler=table.scheduler,
        warmup_steps=table.warmup_steps,
        max_steps=table.max_steps,
        decay_steps=table.decay_steps,
        min_lr=table.min_lr,
    )


@dataclass(slots=True)
class Grouping:
    """`algo` and `length_penalty`; keeps what an algorithm remembers between steps."""

    table: PrimeRl
    _baseline: EmaBaseline = field(default_factory=EmaBaseline)

    def advantages(
        self, rewards_PG: npt.NDArray[np.float64], rollouts: Rollouts
    ) -> npt.NDArray[np.float64]:
        """[P, G]; exactly zero all over a group whose rewards are equal (not with `rae`)."""
        return group_advantages(
            rewards_PG,
            self.table.algo,
            length_penalty=LengthPenalty() if self.table.length_penalty else None,
            lengths=_lengths(rollouts) if self.table.length_penalty else None,
            baseline=self._baseline,
        )

    def train_rows(
        self, rollouts: Rollouts, advantages_PG: npt.NDArray[np.float64]
    ) -> list[TrainRow]:
        """Rows that carry a gradient; groups without a signal are left out."""
        rows = []
        for group, advantages in zip(rollouts, advantages_PG.tolist(), strict=True):
            if self.table.algo != "echo" and not any(advantages):
                continue
            rows += [
                self._train_row(rollout, advantage)
                for rollout, advantage in zip(group, advantages, strict=True)
            ]
        return rows

    def _train_row(self, rollout: Rollout, advantage: float) -> TrainRow:
        return TrainRow(
            ids=rollout.ids,
            sampled=rollout.sampled,
            logprobs=rollout.logprobs,
            advantage=advantage,
            ce_weights=observation_weights(rollout.sampled) if self.table.algo == "echo" else (),
        )


def _lengths(rollouts: Rollouts) -> RolloutLengths:
    sampled = np.array([[sum(rollout.sampled) for rollout in group] for group in rollouts])
    total = np.array([[len(rollout.ids) for rollout in group] for group in rollouts])
    return RolloutLengths(
        output_tokens=sampled,
        input_tokens=total - sampled,
        turns=np.array([[rollout.num_turns for rollout in group] for group in rollouts]),
    )
