"""Trainers: gradients of policy and supervised losses, and optimiser steps, for J jobs at once.

Axes: J job, K predicted token, P parameter, V vocabulary. Gradients accumulate in one flat tensor [J, P];
jobs never mix, so a stack gives each job what it would get alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.core.errors import ConfigError
from nestling.engine.batching import MicroBatch, TrainRow, micro_batches
from nestling.engine.fused import picked_logp
from nestling.engine.leaves import Leaves, trained_tensor
from nestling.engine.lora import LoraConfig, LoraWeights
from nestling.engine.losses import (
    Dppo,
    ImportanceSampling,
    Ipo,
    LossConfig,
    PpoClip,
    reference_kl,
    token_loss,
)
from nestling.engine.model import Dropout, Model, forward, forward_packed, logits
from nestling.engine.optim import (
    AdamW,
    Muon,
    OptimConfig,
    Optimizer,
    Sgd,
    SignSgd,
    clip_norm,
)
from nestling.engine.packing import PackedBatch, packed_batches
from nestling.engine.params import Params, bind
from nestling.engine.step_stats import LossStats, LossTotals, StepStats
from nestling.engine.weights import Weights

__all__ = [
    "AdamW",
    "Dppo",
    "ImportanceSampling",
    "Ipo",
    "LoraConfig",
    "LossConfig",
    "LossStats",
    "Muon",
    "OptimConfig",
    "PolicyTrainer",
    "PpoClip",
    "Sgd",
    "SignSgd",
    "StepStats",
    "SupervisedTrainer",
    "TrainRow",
    "target_logprobs",
]

_CPU_TOKENS, _CUDA_TOKENS = 4096, 65536
_PACKED_TOKENS = 1536
"""Fewer tokens keep activations in the processor's cache; of 256 to 4096, 1024 and 2048 were the fastest."""


def target_logprobs(
    params: Params,
    model: Model,
    batch: MicroBatch | PackedBatch,
    temperature_J: Tensor | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """Float32 log-probabilities [J, K] of a batch's targets, at one temperature per job."""
    J, K = batch.pick.shape
    scores = logits(params, _picked(params, model, batch, dropout))
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if temperature_J is not None:
        scores = scores / temperature_J[:, None, None]
    if isinstance(batch, PackedBatch):
        return picked_logp(scores[0], batch.pick[0], batch.target[0])[None]
    picked = F.cross_entropy(scores.flatten(0, 1), batch.target.flatten(), reduction="none")
    return -picked.view(J, K)


def _picked(
    params: Params, model: Model, batch: MicroBatch | PackedBatch, dropout: Dropout | None
) -> Tensor:
    """Normed hidden states [J, K, D] of the tokens that predict, [1, U, D] of a packed batch."""
    config = model.config
    if isinstance(batch, PackedBatch):
        return forward_packed(
            params,
            config,
            batch.ids,
            batch.positions,
            batch.groups,
            batch.predicting,
            dropout=dropout,
        )
    hidden = forward(params, config, batch.ids, dropout=dropout)
    flat = hidden.view(len(batch.pick), -1, hidden.shape[-1])
    if len(batch.pick) == 1:
        return flat[0].index_select(0, batch.pick[0])[None]
    return flat.gather(1, batch.pick[:, :, None].expand(-1, -1, flat.shape[-1]))


class PolicyTrainer:
    """Policy-gradient training of a model in place.

    `lora` trains adapters instead (they are put into `model.lora`). `kl_coef` adds that many times the
    estimated KL to `reference` (with LoRA: by default the base) to the loss of each action token.
    """

    def __init__(
        self,
        model: Model,
        loss: ImportanceSampling | PpoClip | Dppo | Ipo,
        optim: AdamW | Sgd | Muon | SignSgd,
        *,
        lora: LoraConfig | None = None,
        reference: Weights | None = None,
        kl_coef: float = 0.0,
        token_budget: int | None = None,
        seed: int = 0,
    ) -> None:
        if lora is not None and model.lora is None:
            generator = torch.Generator().manual_seed(seed)
            model.lora = LoraWeights.init(
                model.config, lora, model.weights.num_jobs, generator, model.device
            )
        if kl_coef > 0 and reference is None:
            if model.lora is None:
                raise ConfigError(f"kl_coef={kl_coef} needs reference weights; pass reference=")
            reference = model.weights
        self._model, self._loss, self._kl_coef = model, loss, kl_coef
        self._reference = reference
        self._budget = token_budget or _budget(model)
        self._trained = _Trained(model, optim)
        generator = torch.Generator(model.device).manual_seed(seed)
        share = 0.0 if model.lora is None else model.lora.lora.dropout
        self._dropout = Dropout(share, generator) if share > 0 else None

    def forward_backward(self, rows: Sequence[TrainRow], temperature: float = 1.0) -> LossStats:
        """Add the gradient of the mean loss per action token to what has accumulated (J = 1).

        Rows with advantage 0 and no cross-entropy weight carry no gradient and are skipped; they do not
        count in the normaliser either. `temperature` is the one the rows were sampled at (for greedy rows: 1).
        """
        return self.forward_backward_stacked([rows], [temperature])[0]

    def forward_backward_stacked(
        self, rows_J: Sequence[Sequence[TrainRow]], temperature_J: Sequence[float]
    ) -> list[LossStats]:
        """The same for every job of a stack, in one batch."""
        J = self._model.num_jobs
        if len(rows_J) != J or len(temperature_J) != J:
            raise ConfigError(
                f"rows for {len(rows_J)} jobs and {len(temperature_J)} temperatures; expected {J}"
            )
        if min(temperature_J) <= 0:
            raise ConfigError(
                f"temperature={min(temperature_J)}; expected above 0 (greedy rows are scored at 1)"
            )
        kept = [[row for row in rows if row.advantage or any(row.ce_weights)] for rows in rows_J]
        device = self._model.device
        tokens = torch.tensor([float(sum(map(_count_action, rows))) for rows in kept])
        ce_tokens = torch.tensor([float(sum(map(_count_ce, rows))) for rows in kept])
        temperature = None
        if any(value != 1 for value in temperature_J):
            temperature = torch.tensor(list(temperature_J), dtype=torch.float32, device=device)
        totals = LossTotals(J, device)
        for batch in _batches(self._model, kept, self._budget):
            self._backward(batch, temperature, tokens.to(device), ce_tokens.to(device), totals)
        self._trained.note([len(rows) > 0 for rows in kept])
        return totals.stats([len(rows) for rows in kept], tokens.tolist())

    def optim_step(self, lr: float | Sequence[float] | None = None) -> StepStats:
        """Clip, update and clear the gradient (J = 1); `lr` overrides the config's."""
        return self.optim_step_stacked(lr)[0]

    def optim_step_stacked(self, lr: float | Sequence[float] | None = None) -> list[StepStats]:
        """The same for a stack; `lr` may be one rate per job."""
        return self._trained.step(lr)

    def state_dict(self) -> dict[str, Any]:
        """Trained tensors and optimiser state, as copies; gradients not yet applied are not part of it."""
        state = self._trained.state_dict()
        if self._dropout is not None:
            state["dropout"] = self._dropout.generator.get_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        self._trained.load_state_dict(state)
        if self._dropout is not None and "dropout" in state:
            self._dropout.generator.set_state(state["dropout"].cpu())

    def _backward(
        self,
        batch: MicroBatch | PackedBatch,
        temperature: Tensor | None,
        tokens: Tensor,
        ce_tokens: Tensor,
        totals: LossTotals,
    ) -> None:
        logp = target_logprobs(
            self._trained.leaves.params(self._model.cast),
            self._model,
            batch,
            temperature,
            self._dropout,
        )
        loss, dropped = token_loss(self._loss, logp, batch.old_logp, batch.advantage)
        kl = None
        if self._kl_coef > 0:
            kl = reference_kl(logp, self._reference_logprobs(batch, temperature))
            loss = loss + self._kl_coef * kl
        # A padded or cross-entropy-only place has action 0; where() keeps its overflow out of the sum.
        policy_J = torch.where(batch.action > 0, loss, 0.0).sum(1) / tokens.clamp(min=1)
        ce_J = -(batch.ce * logp).sum(1) / ce_tokens.clamp(min=1)
        self._trained.leaves.accumulate(policy_J.sum() + ce_J.sum())
        totals.add(batch, logp.detach(), dropped, policy_J.detach(), ce_J.detach(), kl)

    @torch.no_grad()
    def _reference_logprobs(
        self, batch: MicroBatch | PackedBatch, temperature: Tensor | None
    ) -> Tensor:
        assert self._reference is not None
        params = bind(self._model.config, self._reference.views(), dtype=self._model.cast)
        return target_logprobs(params, self._model, batch, temperature)


class SupervisedTrainer:
    """Cross-entropy training of a model in place: mean over the tokens marked `sampled`."""

    def __init__(
        self,
        model: Model,
        optim: AdamW | Sgd | Muon | SignSgd,
        *,
        token_budget: int | None = None,
    ) -> None:
        self._model = model
        self._budget = token_budget or _budget(model)
        self._trained = _Trained(model, optim)

    def step(self, rows: Sequence[TrainRow], lr: float | None = None) -> float:
        """One update on these rows; the mean loss per token before it (J = 1)."""
        return self.step_stacked([rows], lr)[0]

    def step_stacked(
        self, rows_J: Sequence[Sequence[TrainRow]], lr: float | Sequence[float] | None = None
    ) -> list[float]:
        """The same for every job of a stack."""
        device = self._model.device
        tokens = [sum(map(_count_action, rows)) for rows in rows_J]
        scale = torch.tensor([1.0 / max(count, 1) for count in tokens], device=device)
        total = torch.zeros(len(rows_J), device=device)
        for batch in _batches(self._model, rows_J, self._budget):
            logp = target_logprobs(
                self._trained.leaves.params(self._model.cast), self._model, batch
            )
            loss_J = -(batch.action * logp).sum(1) * scale
            self._trained.leaves.accumulate(loss_J.sum())
            total += loss_J.detach()
        self._trained.note([count > 0 for count in tokens])
        self._trained.step(lr)
        return [float(value) for value in total.tolist()]

    def evaluate(self, rows: Sequence[TrainRow]) -> float:
        """Mean loss per token without an update (J = 1)."""
        total, count = 0.0, 0.0
        with torch.no_grad():
            for batch in _batches(self._model, [rows], self._budget):
                logp = target_logprobs(
                    self._trained.leaves.params(self._model.cast), self._model, batch
                )
                total -= float((batch.action * logp).sum())
                count += float(batch.action.sum())
        return total / max(count, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Trained tensors and optimiser state, as copies."""
        return self._trained.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        self._trained.load_state_dict(state)


class _Trained:
    """The trained tensors, their gradient and their optimiser."""

    def __init__(self, model: Model, optim: AdamW | Sgd | Muon | SignSgd) -> None:
        self._optim = optim
        self.flat, matrices = trained_tensor(model)
        self.leaves = Leaves(model, self.flat)
        self.grad = self.leaves.grad
        self._optimizer = Optimizer(optim, self.flat, matrices)
        self._pending = [False] * self.flat.shape[0]
        self._count = 0

    def note(self, has_gradient: Sequence[bool]) -> None:
        """Remember which jobs have something to apply."""
        self._pending = [a or b for a, b in zip(self._pending, has_gradient, strict=True)]

    def step(self, lr: float | Sequence[float] | None) -> list[StepStats]:
        jobs = self.flat.shape[0]
        rates = _rates(self._optim.lr if lr is None else lr, jobs)
        if len(rates) != jobs:
            raise ConfigError(f"{len(rates)} learning rates; expected {jobs}, one per job")
        norm = clip_norm(self.grad, self._optim.max_norm)
        finite = torch.isfinite(norm).tolist()
        active = [a and b for a, b in zip(self._pending, finite, strict=True)]
        self._optimizer.step(
            self.grad,
            torch.tensor(rates, dtype=torch.float32, device=self.flat.device),
            None if all(active) else torch.tensor(active, device=self.flat.device),
        )
        self.grad.zero_()
        self._pending = [False] * jobs
        self._count += 1
        return [
            StepStats(lr=rate, grad_norm=value, updated=on, step=self._count)
            for rate, value, on in zip(rates, norm.tolist(), active, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        return {
            "flat": self.flat.detach().clone(),
            "count": self._count,
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["flat"].shape != self.flat.shape:
            raise ConfigError(
                f"the saved state holds {list(state['flat'].shape)}; expected {list(self.flat.shape)}"
            )
        with torch.no_grad():
            self.flat.copy_(state["flat"])
        self.grad.zero_()
        self._pending = [False] * self.flat.shape[0]
        self._count = int(state["count"])
        self._optimizer.load_state_dict(state["optimizer"])


def _rates(lr: float | Sequence[float], jobs: int) -> list[float]:
    return [float(lr)] * jobs if isinstance(lr, int | float) else list(lr)


def _count_action(row: TrainRow) -> int:
    return sum(map(bool, row.sampled))


def _count_ce(row: TrainRow) -> int:
    return sum(weight > 0 for weight in row.ce_weights)


def _budget(model: Model) -> int:
    if model.device.type == "cuda":
        return _CUDA_TOKENS
    return _PACKED_TOKENS if _is_packed(model) else _CPU_TOKENS


def _is_packed(model: Model) -> bool:
    """Whether rows are laid end to end: one job on the CPU, attention without a window."""
    return model.device.type == "cpu" and model.num_jobs == 1 and model.config.gemma is None


def _batches(
    model: Model, rows_J: Sequence[Sequence[TrainRow]], budget: int
) -> Sequence[MicroBatch | PackedBatch]:
    if _is_packed(model):
        return packed_batches(rows_J[0], budget)
    return micro_batches(rows_J, budget, model.device)
