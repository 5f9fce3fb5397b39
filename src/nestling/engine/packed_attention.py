"""Causal attention over packed rows whose groups share a beginning.

Axes: H query head, K key/value head, N token of the batch, d head width. A row's tokens see their group's shared beginning and the row
before them. Each of the two is one fused call that also gives the logarithm of its softmax sum; the outputs are
joined by these sums, and backward each call is given the joint output and sum (as in ring attention,
arXiv:2310.01889). So no key is copied, and a beginning's keys are read once per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["PackedGroup", "packed_attention"]

# The public function does not return the sums. Schema of torch 2.11 to 2.13.
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedGroup:
    """A shared beginning and the rows that go on from it, one after the other."""

    start: int
    """Index of the first token in the batch."""
    prefix: int
    """Tokens of the beginning; 0: the rows share none."""
    runs: tuple[tuple[int, int], ...]
    """(rows, tokens of each) of neighbouring rows of one length."""
    mask: Tensor | None = None
    """[1, 1, n, n], added to the scores of the own tokens in place of causality: a tree of rows is one run."""

    @property
    def own(self) -> slice:
        """The rows' own tokens."""
        first = self.start + self.prefix
        return slice(first, first + sum(count * length for count, length in self.runs))

    @property
    def shared(self) -> slice:
        """The beginning's tokens."""
        return slice(self.start, self.start + self.prefix)


def packed_attention(
    heads: Tensor,
    turn: Tensor | None,
    num_kv_heads: int,
    groups: Sequence[PackedGroup],
    scale: float,
) -> Tensor:
    """Output [1, N, H*d] of fused queries, keys and values heads [1, N, H + 2K, d] on the CPU.

    `turn` [N, 1, d/2] are the complex numbers by which neighbours of queries and keys are turned: rotary positions
    whose halves lie interleaved. It happens in place. None: they are turned already.
    """
    return _PackedAttention.apply(heads, turn, num_kv_heads, groups, scale)  # type: ignore[no-any-return, no-untyped-call]


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        heads: Tensor,
        turn: Tensor | None,
        num_kv_heads: int,
        groups: Sequence[PackedGroup],
        scale: float,
    ) -> Tensor:
        if turn is not None:
            _turn(heads, turn, num_kv_heads)
        q, k, v = _split(heads, num_kv_heads)
        _, H, N, d = q.shape
        out = q.new_empty(1, N, H, d)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        sums = q.new_empty(1, N, H, dtype=wide)
        for group in groups:
            for part, rows in _causal_parts(group):
                pieces = [_rows(one, part, rows) for one in (q, k, v)]
                y, log_sum = _forward(*_repeated(pieces), **_causality(group, q), scale=scale)
                out[0, part].view(rows, -1, H, d).copy_(y.transpose(1, 2))
                sums[0, part].view(rows, -1, H).copy_(log_sum.transpose(1, 2))
            if group.prefix and group.runs:
                own, shared = group.own, group.shared
                pieces = [q[:, :, own], k[:, :, shared], v[:, :, shared]]
                y, log_sum = _forward(*_repeated(pieces), scale=scale)
                _join(out[:, own], sums[:, own], y.transpose(1, 2), log_sum.transpose(1, 2))
        ctx.save_for_backward(heads, turn, out, sums)
        ctx.num_kv_heads, ctx.groups, ctx.scale = num_kv_heads, groups, scale
        return out.view(1, N, H * d)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: ANN401
        heads, turn, out, sums = ctx.saved_tensors
        q, k, v = _split(heads, ctx.num_kv_heads)
        grad, out = grad.view(out.shape).transpose(1, 2), out.transpose(1, 2)
        sums = sums.transpose(1, 2)[..., None]
        whole = torch.empty_like(heads)
        grads = _split(whole, ctx.num_kv_heads)
        for group in ctx.groups:
            for part, rows in _causal_parts(group):
                pieces = [_rows(one, part, rows) for one in (grad, q, k, v, out, sums)]
                found = _backward(
                    pieces[0],
                    *_repeated(pieces[1:4]),
                    pieces[4],
                    pieces[5][..., 0],
                    dropout_p=0.0,
                    **_causality(group, q),
                    scale=ctx.scale,
                )
                for one, piece in zip(grads, found, strict=True):
                    _rows(one, part, rows).copy_(_summed(piece, one.shape[1]))
            if group.prefix and group.runs:
                own, shared = group.own, group.shared
                found = _backward(
                    grad[:, :, own],
                    *_repeated([q[:, :, own], k[:, :, shared], v[:, :, shared]]),
                    out[:, :, own],
                    sums[:, :, own, 0],
                    0.0,
                    False,
                    scale=ctx.scale,
                )
                for one, piece, where in zip(grads, found, (own, shared, shared), strict=True):
                    one[:, :, where] += _summed(piece, one.shape[1])
        if turn is not None:
            _turn(whole, turn.conj(), ctx.num_kv_heads)
        return whole, None, None, None, None


def _turn(heads: Tensor, turn: Tensor, num_kv_heads: int) -> None:
    """Turn queries and keys of heads [1, N, H + 2K, d] in place."""
    _, N, count, d = heads.shape
    pairs = torch.view_as_complex(heads.view(N, count, d // 2, 2))
    pairs[:, :-num_kv_heads].mul_(turn)


def _split(heads: Tensor, num_kv_heads: int) -> list[Tensor]:
    """Views q [1, H, N, d], k and v [1, K, N, d]."""
    count = heads.shape[2] - 2 * num_kv_heads
    return list(torch.split(heads.transpose(1, 2), [count, num_kv_heads, num_kv_heads], 1))


def _repeated(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Queries, and keys and values with one head for each of theirs."""
    q, k, v = pieces
    groups = q.shape[1] // k.shape[1]
    return [q, *(one if groups == 1 else one.repeat_interleave(groups, 1) for one in (k, v))]


def _summed(grad: Tensor, num_heads: int) -> Tensor:
    """The gradient of `num_heads` heads out of that of their copies."""
    rows, count, T, d = grad.shape
    if count == num_heads:
        return grad
    return grad.reshape(rows, num_heads, count // num_heads, T, d).sum(2)


def _causal_parts(group: PackedGroup) -> list[tuple[slice, int]]:
    """Token spans of equally long sequences that see only themselves, and how many sequences each holds."""
    parts = [(group.shared, 1)] if group.prefix else []
    first = group.own.start
    for count, length in group.runs:
        parts.append((slice(first, first + count * length), count))
        first += count * length
    return parts


def _causality(group: PackedGroup, q: Tensor) -> dict[str, Any]:
    """What the fused calls are told about who sees whom."""
    mask = None if group.mask is None else group.mask.to(q.dtype)
    return {"is_causal": mask is None, "attn_mask": mask}


def _rows(x: Tensor, part: slice, rows: int) -> Tensor:
    """[rows, H, T, d], a view of tokens `part` of x [1, H, N, d]."""
    H, d = x.shape[1], x.shape[3]
    return x[0, :, part].view(H, rows, -1, d).transpose(0, 1)


def _join(out: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor) -> None:
    """Make out [1, n, H, d] and its log sums [1, n, H] those over both key sets, in place."""
    joint = torch.logaddexp(sums, other_sums)
    out.mul_((sums - joint).exp_()[..., None])
    out.addcmul_(other, (other_sums - joint).exp_()[..., None])
    sums.copy_(joint)
