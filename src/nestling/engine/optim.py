"""Optimisers over flat weights: one update for J jobs, each with its own rate, norm limit and step count.

Axes: J job, P parameter. Formulas are torch 2's for AdamW and SGD (`torch.optim`), prime-rl's for sign_sgd
(`trainer/sign_sgd.py`, August 2026), and Muon as prime-rl sets it up (`trainer/optim/__init__.py`):
orthogonalised momentum on every projection matrix, step scaled by 0.2 sqrt(max(rows, columns)), AdamW on
embeddings, output layer and norms. Deviation: Newton-Schulz uses the five equal steps of Jordan et al. 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from nestling.core.errors import ConfigError
from nestling.core.frozen import Frozen

__all__ = [
    "AdamW",
    "Muon",
    "OptimConfig",
    "Optimizer",
    "Sgd",
    "SignSgd",
    "clip_norm",
    "orthogonalise",
]

_EPS = 1e-8


class _Base(Frozen):
    lr: float = Field(ge=0)
    """Used when a step is given no rate of its own."""
    weight_decay: float = Field(default=0.01, ge=0)
    max_norm: float | None = Field(default=1.0, ge=0)
    """Gradients of a job are scaled down to this norm; None: never."""


class AdamW(_Base):
    """Adam with decoupled weight decay."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)


class Sgd(_Base):
    """Momentum with L2 decay added to the gradient."""

    kind: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = True


class Muon(_Base):
    """Orthogonalised momentum for matrices, AdamW for the rest."""

    kind: Literal["muon"] = "muon"
    momentum: float = Field(default=0.95, ge=0, lt=1)
    betas: tuple[float, float] = (0.9, 0.95)


class SignSgd(_Base):
    """The sign of the gradient, without state."""

    kind: Literal["sign_sgd"] = "sign_sgd"


OptimConfig = Annotated[AdamW | Sgd | Muon | SignSgd, Field(discriminator="kind")]


class Optimizer:
    """State and update of flat weights [J, P]; `matrices` are (offset, rows, columns) inside P for Muon."""

    def __init__(
        self,
        config: AdamW | Sgd | Muon | SignSgd,
        flat_JP: Tensor,
        matrices: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        self.config = config
        self._flat = flat_JP
        self._matrices = sorted(matrices)
        jobs = flat_JP.shape[0]
        self._steps = torch.zeros(jobs, dtype=torch.long, device=flat_JP.device)
        self._first = None if config.kind == "sign_sgd" else torch.zeros_like(flat_JP)
        self._second = torch.zeros_like(flat_JP) if config.kind in ("adamw", "muon") else None

    @torch.no_grad()
    def step(self, grad_JP: Tensor, lr_J: Tensor, active_J: Tensor | None = None) -> None:
        """Update in place; jobs that are not active keep weights, state and step count bit for bit."""
        if active_J is not None and not bool(active_J.all()):
            self._step_some(grad_JP, lr_J, active_J)
            return
        self._steps += 1
        self._update(grad_JP, lr_J[:, None].to(self._flat.dtype))

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of everything a resumed run needs."""
        named = {"steps": self._steps, "first": self._first, "second": self._second}
        return {name: value.clone() for name, value in named.items() if value is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict` of an optimiser of the same kind and shape."""
        own = {"steps": self._steps, "first": self._first, "second": self._second}
        for name, value in own.items():
            if value is None:
                continue
            if name not in state or state[name].shape != value.shape:
                raise ConfigError(
                    f"optimiser state {name!r} is missing or has another shape; "
                    f"expected {list(value.shape)} of a {self.config.kind} run"
                )
            value.copy_(state[name])

    def adamw_fused(self, grad: Tensor, lr_J1: Tensor) -> None:
        """The update of `adamw` in one kernel per job, as `step` does it on a GPU; rounds differently."""
        config = self.config
        assert isinstance(config, AdamW)
        assert self._first is not None
        assert self._second is not None
        for j in range(grad.shape[0]):
            torch._fused_adamw_(
                [self._flat[j]],
                [grad[j]],
                [self._first[j]],
                [self._second[j]],
                [],
                [self._steps[j].float()],
                lr=lr_J1[j, 0].float(),
                beta1=config.betas[0],
                beta2=config.betas[1],
                weight_decay=config.weight_decay,
                eps=_EPS,
                amsgrad=False,
                maximize=False,
            )

    def _step_some(self, grad_JP: Tensor, lr_J: Tensor, active_J: Tensor) -> None:
        index = active_J.nonzero()[:, 0]
        if len(index) == 0:
            return
        some = Optimizer.__new__(Optimizer)
        some.config, some._matrices = self.config, self._matrices
        some._flat, some._steps = self._flat[index], self._steps[index]
        some._first = None if self._first is None else self._first[index]
        some._second = None if self._second is None else self._second[index]
        some.step(grad_JP[index], lr_J[index])
        self._flat[index], self._steps[index] = some._flat, some._steps
        if self._first is not None and some._first is not None:
            self._first[index] = some._first
        if self._second is not None and some._second is not None:
            self._second[index] = some._second

    def _update(self, grad: Tensor, lr: Tensor) -> None:
        config, flat = self.config, self._flat
        if isinstance(config, AdamW) and flat.is_cuda:
            self.adamw_fused(grad, lr)
            return
        if isinstance(config, Sgd):
            assert self._first is not None
            if config.weight_decay:
                grad = grad + config.weight_decay * flat
            self._first.mul_(config.momentum).add_(grad)
            step = grad + config.momentum * self._first if config.nesterov else self._first
            flat.sub_(lr * step)
            return
        if config.weight_decay:
            flat.mul_(1 - lr * config.weight_decay)
        if isinstance(config, SignSgd):
            flat.sub_(lr * grad.sign())
        elif isinstance(config, AdamW):
            self._adam(slice(None), grad, lr, config.betas)
        else:
            self._muon(config, grad, lr)

    def _adam(self, span: slice, grad: Tensor, lr: Tensor, betas: tuple[float, float]) -> None:
        assert self._first is not None
        assert self._second is not None
        first, second, part = self._first[:, span], self._second[:, span], grad[:, span]
        steps = self._steps[:, None].to(grad.dtype)
        first.lerp_(part, 1 - betas[0])
        second.mul_(betas[1]).addcmul_(part, part, value=1 - betas[1])
        unbias_first = 1 - betas[0] ** steps
        unbias_second = (1 - betas[1] ** steps).sqrt()
        root = second.sqrt().div_(unbias_second).add_(_EPS)
        self._flat[:, span].sub_((first * (lr / unbias_first)).div_(root))

    def _muon(self, config: Muon, grad: Tensor, lr: Tensor) -> None:
        assert self._first is not None
        jobs, done = grad.shape[0], 0
        for offset, rows, columns in self._matrices:
            if offset > done:
                self._adam(slice(done, offset), grad, lr, config.betas)
            done = offset + rows * columns
            span = slice(offset, done)
            momentum = self._first[:, span].mul_(config.momentum).add_(grad[:, span])
            update = orthogonalise(momentum.reshape(jobs, rows, columns)).reshape(jobs, -1)
            self._flat[:, span].sub_(lr * (0.2 * math.sqrt(max(rows, columns))) * update)
        if done < grad.shape[1]:
            self._adam(slice(done, grad.shape[1]), grad, lr, config.betas)


def clip_norm(grad_JP: Tensor, max_norm: float | None) -> Tensor:
    """Scale each job's gradient in place to at most `max_norm`; the norms [J] before that."""
    norm_J: Tensor = torch.linalg.vector_norm(grad_JP, dim=1)
    if max_norm is not None:
        grad_JP.mul_((max_norm / (norm_J + 1e-6)).clamp(max=1.0)[:, None])
    return norm_J


def orthogonalise(matrix: Tensor, num_steps: int = 5) -> Tensor:
    """Roughly the nearest (semi-)orthogonal matrices of [J, rows, columns], singular values near 1.

    Quintic Newton-Schulz iteration of Jordan et al. 2024, "Muon: an optimizer for hidden layers".
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = matrix.transpose(1, 2) if matrix.shape[1] > matrix.shape[2] else matrix
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.transpose(1, 2) if matrix.shape[1] > matrix.shape[2] else x
