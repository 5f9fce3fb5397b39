"""Rows of tokens laid end to end without padding, a shared beginning computed once.

Axes: N token of a batch, K predicted token, U token that predicts. Rows of a GRPO group begin with the same prompt:
everything before the first predicted token is put into the batch once, the rows' own tokens follow it and see it. Short
rows often go on alike, too: where that saves enough, a group is laid out as a tree in which every distinct beginning is
one token. Gradients are those of rows computed one by one, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nestling.engine.batching import PreparedRow, TrainRow, prepare_rows
from nestling.engine.packed_attention import PackedGroup

__all__ = ["PackedBatch", "packed_batches"]

_Indices = npt.NDArray[np.int64]

_SHORTEST_SHARED = 8
"""A shared beginning costs a second attention call per group; below this length that is more than it saves."""

_PAIRS_PER_TOKEN = 500
"""A tree's attention computes every pair of its tokens; a token saved is worth about this many pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Tokens of one job and K predicted ones; the [1, K] fields are those of `MicroBatch`."""

    ids: Tensor
    """[N]."""
    positions: Tensor
    """[N]: place of each token in its row."""
    groups: tuple[PackedGroup, ...]
    predicting: Tensor
    """[U]: index into N of the tokens that predict something."""
    pick: Tensor
    """[1, K]: index into U; rows that share a beginning share its tokens."""
    target: Tensor
    action: Tensor
    old_logp: Tensor
    advantage: Tensor
    ce: Tensor


def packed_batches(rows: Sequence[TrainRow], token_budget: int) -> list[PackedBatch]:
    """Batches of about `token_budget` tokens at most; a longer row is a batch of its own."""
    batches: list[_Batch] = [_Batch()]
    for prefix, members in _families(prepare_rows(rows)):
        tree = _tree(members, prefix, token_budget)
        whole = prefix + sum(_own(row, prefix) for row in members) if tree is None else tree.tokens
        fits_later = prefix > 0 and whole <= token_budget
        if batches[-1].tokens and fits_later and batches[-1].tokens + whole > token_budget:
            batches.append(_Batch())
        if tree is not None:
            batches[-1].parts.append(tree)
            batches[-1].tokens += whole
            continue
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


class _Layout(NamedTuple):
    """Where the tokens of some rows are, n of them."""

    rows: Sequence[PreparedRow]
    ids: _Indices  # [n]
    positions: _Indices  # [n]
    paths: list[_Indices]
    """Per row the places of its tokens in `ids`; its last token predicts nothing and has none."""
    prefix: int
    runs: tuple[tuple[int, int], ...]
    mask: Tensor | None = None
    """The last three as in `PackedGroup`."""

    @property
    def tokens(self) -> int:
        """How many: n."""
        return len(self.ids)


@dataclass(slots=True)
class _Batch:
    parts: list[_Layout | tuple[int, list[PreparedRow]]] = field(default_factory=list)
    """A tree; or the length of the shared beginning, and the rows that begin with it."""
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


def _tree(members: Sequence[PreparedRow], prefix: int, token_budget: int) -> _Layout | None:
    """A family with each of its equal beginnings laid out once; None where that would not pay."""
    if prefix == 0:
        return None
    rows = sorted(members, key=lambda row: row.ids[:-1].tolist())  # what begins alike is together
    paths: list[_Indices] = []
    tokens = 0
    for index, row in enumerate(rows):
        shared = _common(rows[index - 1].ids[:-1], row.ids[:-1]) if index else 0
        fresh = np.arange(tokens, tokens + len(row.ids) - 1 - shared)
        paths.append(np.concatenate((paths[-1][:shared], fresh)) if index else fresh)
        tokens += len(fresh)
    saved = prefix + sum(_own(row, prefix) for row in rows) - tokens
    if tokens > token_budget or tokens**2 > _PAIRS_PER_TOKEN * saved:
        return None
    ids, positions = np.empty(tokens, np.int64), np.empty(tokens, np.int64)
    hidden = np.ones((tokens, tokens), bool)
    for row, path in zip(rows, paths, strict=True):
        ids[path], positions[path] = row.ids[:-1], np.arange(len(path))
        hidden[np.ix_(path, path)] = ~np.tri(len(path), dtype=bool)
    mask = torch.zeros(1, 1, tokens, tokens)
    mask.masked_fill_(torch.from_numpy(hidden), -math.inf)
    return _Layout(rows, ids, positions, paths, 0, ((1, tokens),), mask)


def _common(a: _Indices, b: _Indices) -> int:
    """Length of the equal beginning."""
    size = min(len(a), len(b))
    differing = np.nonzero(a[:size] != b[:size])[0]
    return int(differing[0]) if len(differing) else size


def _lined_up(prefix: int, rows: Sequence[PreparedRow]) -> _Layout:
    """A shared beginning and then the rows' own tokens, one row after the other."""
    ids, positions, paths = [rows[0].ids[:prefix]], [np.arange(prefix)], []
    done = prefix
    for row in rows:
        own = _own(row, prefix)
        ids.append(row.ids[prefix:-1])
        positions.append(np.arange(prefix, prefix + own))
        paths.append(np.concatenate((np.arange(prefix), np.arange(done, done + own))))
        done += own
    lengths = [_own(row, prefix) for row in rows]
    runs = tuple((len(list(same)), length) for length, same in groupby(lengths) if length)
    return _Layout(rows, np.concatenate(ids), np.concatenate(positions), paths, prefix, runs)


def _pack(parts: Sequence[_Layout | tuple[int, list[PreparedRow]]]) -> PackedBatch:
    layouts = []
    for part in parts:
        if isinstance(part, _Layout):
            layouts.append(part)
        elif part[1]:
            layouts.append(_lined_up(*part))
    starts = np.cumsum([0, *(layout.tokens for layout in layouts)])[:-1].tolist()
    ordered = [row for layout in layouts for row in layout.rows]
    places = [
        start + path[row.place - 1]
        for start, layout in zip(starts, layouts, strict=True)
        for row, path in zip(layout.rows, layout.paths, strict=True)
    ]
    predicting, pick = np.unique(np.concatenate(places), return_inverse=True)
    target = np.concatenate([row.ids[row.place] for row in ordered])
    advantage = np.concatenate(
        [np.full(len(row.place), row.advantage, np.float32) for row in ordered]
    )
    return PackedBatch(
        ids=torch.from_numpy(np.concatenate([layout.ids for layout in layouts])),
        positions=torch.from_numpy(np.concatenate([layout.positions for layout in layouts])),
        groups=tuple(
            PackedGroup(start=start, prefix=layout.prefix, runs=layout.runs, mask=layout.mask)
            for start, layout in zip(starts, layouts, strict=True)
        ),
        predicting=torch.from_numpy(predicting),
        pick=torch.from_numpy(pick)[None],
        target=torch.from_numpy(target)[None],
        action=torch.from_numpy(np.concatenate([row.action for row in ordered]))[None],
        old_logp=torch.from_numpy(np.concatenate([row.old_logp for row in ordered]))[None],
        advantage=torch.from_numpy(advantage)[None],
        ce=torch.from_numpy(np.concatenate([row.ce for row in ordered]))[None],
    )
