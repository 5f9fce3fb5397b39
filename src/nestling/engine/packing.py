"""Rows of tokens laid end to end without padding, a shared beginning computed once.

Axes: N token of a batch, K predicted token. Rows of a GRPO group begin with the same prompt: everything before the
first predicted token is put into the batch once, the rows' own tokens follow it and see it. Gradients are those of
rows computed one by one, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from nestling.engine.batching import PreparedRow, TrainRow, prepare_rows
from nestling.engine.packed_attention import PackedGroup

__all__ = ["PackedBatch", "packed_batches"]

_SHORTEST_SHARED = 8
"""A shared beginning costs a second attention call per group; below this length that is more than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Tokens of one job and K predicted ones; the [1, K] fields are those of `MicroBatch`."""

    ids: Tensor
    """[N]."""
    positions: Tensor
    """[N]: place of each token in its row."""
    groups: tuple[PackedGroup, ...]
    pick: Tensor
    """[1, K]: index into N of the token that predicts; rows that share a beginning share its last token."""
    target: Tensor
    action: Tensor
    old_logp: Tensor
    advantage: Tensor
    ce: Tensor


def packed_batches(rows: Sequence[TrainRow], token_budget: int) -> list[PackedBatch]:
    """Batches of about `token_budget` tokens at most; a longer row is a batch of its own."""
    batches: list[_Batch] = [_Batch()]
    for prefix, members in _families(prepare_rows(rows)):
        whole = prefix + sum(_own(row, prefix) for row in members)
        fits_later = prefix > 0 and whole <= token_budget
        if batches[-1].tokens and fits_later and batches[-1].tokens + whole > token_budget:
            batches.append(_Batch())
        part: list[PreparedRow] = []
        batches[-1].parts.append((prefix, part))
        batches[-1].tokens += prefix
        for row in members:
            if batches[-1].tokens + _own(row, prefix) > token_budget and not batches[-1].is_fresh(
                prefix
            ):
                part = []
                batches.append(_Batch(parts=[(prefix, part)], tokens=prefix))
            part.append(row)
            batches[-1].tokens += _own(row, prefix)
    return [_pack(batch.parts) for batch in batches if batch.tokens]


@dataclass(slots=True)
class _Batch:
    parts: list[tuple[int, list[PreparedRow]]] = field(default_factory=list)
    """Length of the shared beginning, and the rows that begin with it."""
    tokens: int = 0

    def is_fresh(self, prefix: int) -> bool:
        """Whether nothing but one shared beginning is in it."""
        return self.tokens == prefix


def _families(rows: Sequence[PreparedRow]) -> list[tuple[int, list[PreparedRow]]]:
    """Rows by shared beginning, longest rows first; those that share none are one family of prefix 0."""
    by_start: dict[bytes, list[PreparedRow]] = {}
    for row in rows:
        by_start.setdefault(row.ids[: row.place[0]].tobytes(), []).append(row)
    lonely: list[PreparedRow] = []
    found = []
    for members in by_start.values():
        prefix = int(members[0].place[0])
        if len(members) == 1 or prefix < _SHORTEST_SHARED:
            lonely += members
        else:
            found.append((prefix, sorted(members, key=lambda row: -len(row.ids))))
    if lonely:
        found.append((0, sorted(lonely, key=lambda row: -len(row.ids))))
    return found


def _own(row: PreparedRow, prefix: int) -> int:
    """Tokens of a row behind its shared beginning that some prediction needs."""
    return len(row.ids) - 1 - prefix


def _pack(parts: Sequence[tuple[int, Sequence[PreparedRow]]]) -> PackedBatch:
    ids, positions, pick, ordered = [], [], [], []
    groups, done = [], 0
    for prefix, rows in parts:
        if not rows:
            continue
        start = done
        ids.append(rows[0].ids[:prefix])
        positions.append(np.arange(prefix))
        done += prefix
        for row in rows:
            # A place at the end of the shared beginning is there; all others are in the row's own part.
            before = row.place - 1
            pick.append(before + np.where(before < prefix, start, done - prefix))
            ids.append(row.ids[prefix:-1])
            positions.append(np.arange(prefix, len(row.ids) - 1))
            done += _own(row, prefix)
            ordered.append(row)
        lengths = [_own(row, prefix) for row in rows]
        runs = tuple((len(list(same)), length) for length, same in groupby(lengths) if length)
        groups.append(PackedGroup(start=start, prefix=prefix, runs=runs))
    target = np.concatenate([row.ids[row.place] for row in ordered])
    advantage = np.concatenate(
        [np.full(len(row.place), row.advantage, np.float32) for row in ordered]
    )
    return PackedBatch(
        ids=torch.from_numpy(np.concatenate(ids)),
        positions=torch.from_numpy(np.concatenate(positions)),
        groups=tuple(groups),
        pick=torch.from_numpy(np.concatenate(pick))[None],
        target=torch.from_numpy(target)[None],
        action=torch.from_numpy(np.concatenate([row.action for row in ordered]))[None],
        old_logp=torch.from_numpy(np.concatenate([row.old_logp for row in ordered]))[None],
        advantage=torch.from_numpy(advantage)[None],
        ce=torch.from_numpy(np.concatenate([row.ce for row in ordered]))[None],
    )
