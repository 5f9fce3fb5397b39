"""Rows of tokens as padded micro-batches.

Axes: J job, B row, T token, K predicted token. Rows of similar length share a micro-batch, everything behind
a row's last predicted token is cut off, and the output layer is asked for predicted tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nestling.core.errors import ConfigError

__all__ = ["MicroBatch", "PreparedRow", "TrainRow", "micro_batches", "prepare_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRow:
    """One sequence to learn from."""

    ids: Sequence[int]
    sampled: Sequence[bool]
    """Tokens the loss is about: the policy's own in RL, the imitated ones in supervised training."""
    logprobs: Sequence[float] = field(default=())
    """The sampler's log-probability of each token (any number where not sampled); unused in supervision."""
    advantage: float = 0.0
    ce_weights: Sequence[float] = field(default=())
    """Cross-entropy weight per token (`advantage.observation_weights`); empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Padded rows of J jobs, and K predicted tokens of each job (padded, `action`/`ce` zero there)."""

    ids: Tensor
    """[J, B, T]."""
    pick: Tensor
    """[J, K]: index into B*T of the position that predicts."""
    target: Tensor
    """[J, K]: the token to predict."""
    action: Tensor
    """[J, K]: 1.0 on action tokens."""
    old_logp: Tensor
    advantage: Tensor
    ce: Tensor
    """[J, K]: cross-entropy weights."""

    @classmethod
    def on(
        cls,
        device: torch.device | str,
        ids: npt.NDArray[np.int64],
        index: npt.NDArray[np.int64],
        values: npt.NDArray[np.float32],
    ) -> MicroBatch:
        """Move ids [J, B, T], index [2, J, K] (pick, target) and values [4, J, K] in one piece each.

        The values are action, old_logp, advantage and ce.
        """
        moved_index, moved = torch.from_numpy(index).to(device), torch.from_numpy(values).to(device)
        return cls(
            ids=torch.from_numpy(ids).to(device),
            pick=moved_index[0],
            target=moved_index[1],
            action=moved[0],
            old_logp=moved[1],
            advantage=moved[2],
            ce=moved[3],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRow:
    """A row as arrays, without what is behind its last predicted token."""

    ids: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]  # positions of predicted tokens
    action: npt.NDArray[np.float32]
    old_logp: npt.NDArray[np.float32]
    ce: npt.NDArray[np.float32]
    advantage: float


def micro_batches(
    rows_J: Sequence[Sequence[TrainRow]],
    token_budget: int,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """Split each job's rows so that J * B * T stays near `token_budget`, longest rows first."""
    prepared_J = [sorted(prepare_rows(rows), key=_length)[::-1] for rows in rows_J]
    total, start, found = max((len(rows) for rows in prepared_J), default=0), 0, []
    while start < total:
        longest = max(len(rows[start].ids) for rows in prepared_J if start < len(rows))
        count = max(1, token_budget // (len(rows_J) * longest))
        chunk = [rows[start : start + count] for rows in prepared_J]
        found.append(_pack(chunk, longest, device))
        start += count
    return found


def prepare_rows(rows: Sequence[TrainRow]) -> list[PreparedRow]:
    """Rows that have something to predict; ConfigError for fields of different lengths."""
    return [row for row in map(_prepare, rows) if row is not None]


def _length(row: PreparedRow) -> int:
    return len(row.ids)


def _prepare(row: TrainRow) -> PreparedRow | None:
    count = len(row.ids)
    sampled = np.asarray(row.sampled, bool)
    weights = np.asarray(row.ce_weights, np.float32) if len(row.ce_weights) else None
    logp = np.asarray(row.logprobs, np.float32) if len(row.logprobs) else None
    for name, array in (("sampled", sampled), ("ce_weights", weights), ("logprobs", logp)):
        if array is not None and len(array) != count:
            raise ConfigError(f"a row has {count} ids but {len(array)} {name}; expected one each")
    wanted = sampled if weights is None else sampled | (weights > 0)
    place = np.nonzero(wanted)[0]
    if len(place) == 0:
        return None
    if place[0] == 0:
        raise ConfigError("the first token of a row cannot be predicted; mark it as given")
    return PreparedRow(
        ids=np.asarray(row.ids, np.int64)[: place[-1] + 1],
        place=place,
        action=sampled[place].astype(np.float32),
        old_logp=np.zeros(len(place), np.float32) if logp is None else logp[place],
        ce=np.zeros(len(place), np.float32) if weights is None else weights[place],
        advantage=row.advantage,
    )


def _pack(rows_J: list[list[PreparedRow]], longest: int, device: torch.device | str) -> MicroBatch:
    J, B, T = len(rows_J), max(len(rows) for rows in rows_J), longest - 1
    K = max(sum(len(row.place) for row in rows) for rows in rows_J)
    ids = np.zeros((J, B, T), np.int64)
    index = np.zeros((2, J, K), np.int64)  # pick, target
    values = np.zeros((4, J, K), np.float32)  # action, old_logp, advantage, ce
    for j, rows in enumerate(rows_J):
        k = 0
        for b, row in enumerate(rows):
            ids[j, b, : len(row.ids) - 1] = row.ids[:-1]
            span = slice(k, k + len(row.place))
            index[0, j, span] = b * T + row.place - 1
            index[1, j, span] = row.ids[row.place]
            values[0, j, span], values[1, j, span] = row.action, row.old_logp
            values[2, j, span], values[3, j, span] = row.advantage, row.ce
            k += len(row.place)
    return MicroBatch.on(device, ids, index, values)
