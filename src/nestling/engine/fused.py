"""Elementwise work between the matrix products, with backward passes of its own.

They exist because on a CPU this work decides whether training keeps up with a stock implementation.
Axes: J job, N token of all rows, R row of all jobs, T token of a row, H query head, K key/value head, D hidden, d head;
in `picked_logp` U row of scores, V vocabulary, P pick.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["geglu", "picked_logp", "rms_norm", "split_rotary", "swiglu"]


def _turn(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the halves of x [..., h, d] into `out`."""
    a, b = x.chunk(2, -1)
    out_a, out_b = out.chunk(2, -1)
    torch.mul(a, cos, out=out_a)
    out_a.addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b)
    out_b.addcmul_(a, sin)


def split_rotary(
    fused: Tensor, cos: Tensor, sin: Tensor, H: int, K: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Q [R, H, T, d], k and v [R, K, T, d] of fused rows [R, T, H+2K, d]; q and k rotated."""
    if torch.is_grad_enabled() and fused.requires_grad:
        q, k, v = _SplitRotary.apply(fused, cos, sin, H, K)  # type: ignore[no-untyped-call]
        return q, k, v
    R, T, _, d = fused.shape
    turned = fused.new_empty(R, H + K, T, d)
    _turn(fused[:, :, : H + K], turned.transpose(1, 2), cos, sin)
    return turned[:, :H], turned[:, H:], fused[:, :, H + K :].transpose(1, 2)


class _SplitRotary(torch.autograd.Function):
    """Fused rows [R, T, H+2K, d] to rotated q, k and plain v; one buffer each way."""

    @staticmethod
    def forward(ctx: Any, fused: Tensor, cos: Tensor, sin: Tensor, H: int, K: int) -> Any:  # noqa: ANN401
        ctx.save_for_backward(cos, sin)
        ctx.heads = (H, K)
        R, T, _, d = fused.shape
        q, k = fused.new_empty(R, H, T, d), fused.new_empty(R, K, T, d)
        _turn(fused[:, :, :H], q.transpose(1, 2), cos, sin)
        _turn(fused[:, :, H : H + K], k.transpose(1, 2), cos, sin)
        return q, k, fused[:, :, H + K :].transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> Any:  # noqa: ANN401
        cos, sin = ctx.saved_tensors
        H, K = ctx.heads
        R, _, T, d = grad_q.shape
        grad = grad_q.new_empty(R, T, H + 2 * K, d)
        _turn(grad_q.transpose(1, 2), grad[:, :, :H], cos, -sin)
        _turn(grad_k.transpose(1, 2), grad[:, :, H : H + K], cos, -sin)
        grad[:, :, H + K :] = grad_v.transpose(1, 2)
        return grad, None, None, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X [J, N, D] scaled to unit root mean square, times weight [J or 1, 1, D]."""
    if x.is_cuda:
        return F.rms_norm(x, (x.shape[-1],), eps=eps) * weight
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return, no-untyped-call]
    if weight.shape[0] == 1:
        return F.rms_norm(x, (x.shape[-1],), weight.view(-1), eps)
    return F.rms_norm(x, (x.shape[-1],), eps=eps).mul_(weight)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    square: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    return square.div_(x.shape[-1]).add_(eps).rsqrt_()


class _RmsNorm(torch.autograd.Function):
    """RMS norm with a short backward; the stock CPU one is made of a dozen passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # noqa: ANN401
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: ANN401
        x, weight, inverse = ctx.saved_tensors
        both = grad * x
        # By products of a matrix and a vector, which take half the time of multiplying and summing.
        along = torch.stack([both[j] @ _of_job(weight, j)[0] for j in range(len(x))])
        grad_weight = None
        if ctx.needs_input_grad[1]:
            summed = torch.stack([inverse[j, :, 0] @ both[j] for j in range(len(x))])
            grad_weight = summed[:, None].sum_to_size(weight.shape)
        along.mul_(inverse[..., 0].pow(3)).div_(-x.shape[-1])
        scaled = torch.mul(grad, weight, out=both).mul_(inverse)
        return scaled.addcmul_(x, along[..., None]), grad_weight, None


def _of_job(weight: Tensor, j: int) -> Tensor:
    """[1, D] of weight [J or 1, 1, D]."""
    return weight[j if len(weight) > 1 else 0]


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up on fused halves [..., 2F]; without gradients their memory is used."""
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _SwiGlu.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up on fused halves [..., 2F], by the approximation with tanh."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up on fused halves; the gradient is written into one buffer."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:  # noqa: ANN401
        gate, up = gate_up.chunk(2, -1)
        opened = F.silu(gate)
        # Computed again it would take a third of a CPU's backward; on a GPU memory is dearer.
        ctx.save_for_backward(gate_up, None if gate_up.is_cuda else opened)
        return opened.mul_(up) if gate_up.is_cuda else opened * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: ANN401
        gate_up, opened = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        out_gate, out_up = out.chunk(2, -1)
        torch.mul(F.silu(gate) if opened is None else opened, grad, out=out_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=out_gate)
        return out


def picked_logp(scores_UV: Tensor, row_P: Tensor, token_P: Tensor) -> Tensor:
    """Log-probabilities [P] of one token each; a row may be picked by several."""
    return _PickedLogp.apply(scores_UV, row_P, token_P)  # type: ignore[no-any-return, no-untyped-call]


class _PickedLogp(torch.autograd.Function):
    """The gradient of a row is the picks' sum times minus its probabilities, and the picks' own."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, row: Tensor, token: Tensor) -> Tensor:  # noqa: ANN401
        logp = torch.log_softmax(scores, -1)
        place = row * scores.shape[1] + token
        ctx.save_for_backward(logp, row, place)
        return logp.view(-1).index_select(0, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: ANN401
        logp, row, place = ctx.saved_tensors
        total = grad.new_zeros(len(logp), 1).index_add_(0, row, grad[:, None])
        out = logp.exp().mul_(total.neg_())
        out.view(-1).index_add_(0, place, grad)
        return out, None, None
