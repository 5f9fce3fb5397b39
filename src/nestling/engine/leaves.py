"""What of a model is trained, as leaves of the graph whose gradients land in one flat tensor.

Axes: J job, P parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nestling.engine.model import Model
from nestling.engine.params import Params, bind
from nestling.engine.weights import layout, parts, split_views

__all__ = ["Leaves", "trained_tensor"]


class Leaves:
    """The trained tensors of J jobs; a gradient is added to `grad` [J, P]."""

    def __init__(self, model: Model, flat: Tensor) -> None:
        """`flat` [J, P] is what `trained_tensor` gives for models like this one, of any number of jobs."""
        self._model = model
        self.grad = torch.zeros_like(flat)
        self._leaves = {
            name: view.detach().requires_grad_() for name, view in self._split(flat).items()
        }
        self._grads = list(self._split(self.grad).values())

    def params(self, dtype: torch.dtype | None, jobs: Sequence[int] | None = None) -> Params:
        """Tensors for a forward pass that records gradients, of all jobs or of some; see `bind` for `dtype`."""
        model, leaves = self._model, self._leaves
        if jobs is not None and len(jobs) < len(self.grad):
            where = torch.tensor(list(jobs), device=self.grad.device)
            leaves = {name: leaf.index_select(0, where) for name, leaf in leaves.items()}
        if model.lora is None:
            return bind(model.config, leaves, dtype=dtype)
        base = {name: view.detach() for name, view in model.weights.views().items()}
        return bind(model.config, base, adapters=model.lora.adapters(leaves), dtype=dtype)

    def accumulate(self, loss: Tensor) -> None:
        """Add the gradient of a scalar to `grad`."""
        torch._foreach_add_(
            self._grads, list(torch.autograd.grad(loss, list(self._leaves.values())))
        )

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        lora = self._model.lora
        return split_views(self._model.config, flat) if lora is None else lora.views(flat)


def trained_tensor(model: Model) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """Adapters or else weights [J, P], and (offset, rows, columns) of every matrix inside."""
    if model.lora is not None:
        return model.lora.flat, model.lora.matrices()
    return model.weights.flat, _projections(model)


def _projections(model: Model) -> list[tuple[int, int, int]]:
    """(offset, rows, columns) of every projection inside a model's flat weights."""
    offsets = {slot.name: slot.offset for slot in layout(model.config)}
    return [
        (offsets[part.slot] + part.start_row * part.shape[1], part.shape[0], part.shape[1])
        for part in parts(model.config)
        if len(part.shape) == 2 and part.slot not in ("embed", "lm_head")
    ]
