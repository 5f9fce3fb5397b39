"""One decode step with sampling of one job on a CPU; see `decoder` for the other devices and for several jobs.

Axes: S slot, R cache row, V vocabulary. Slots whose tokens have been the same so far are computed as one row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from nestling.engine.config import ModelConfig
from nestling.engine.cpu_cache import CpuCache
from nestling.engine.cpu_step import CpuStep
from nestling.engine.decoder import sample_tokens
from nestling.engine.params import Params
from nestling.engine.slot_rows import Copies, SlotRows

__all__ = ["CpuDecoder"]

_FIRST_LENGTH = 128
"""Positions a cache begins with; it doubles when they are used up. Clearing memory costs time."""


class CpuDecoder:
    """A `Decoder` for parameters that `CpuStep` fits."""

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        *,
        num_slots: int,
        max_len: int,
        temperature: float,
    ) -> None:
        self._max_len, self._vocab_size = max_len, config.vocab_size
        self._cache = CpuCache(config, num_slots, min(max_len, _FIRST_LENGTH))
        self._step = CpuStep(params, config, self._cache, max_len)
        self._rows = SlotRows(num_slots)
        self._uniforms = np.zeros((num_slots, max_len + 1), np.float32)
        self._temperature = temperature
        self.scratch_row = num_slots
        """Not used: one job has no padded rows."""

    def set_uniforms(self, slot: int, values: npt.NDArray[np.float32]) -> None:
        """A sequence begins in a slot; install its random numbers."""
        self._rows.begin(slot)
        self._uniforms[slot, : len(values)] = values

    def extend(
        self,
        ids: npt.NDArray[np.int64],
        start: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
    ) -> None:
        """Append ids [1, b, T] at start [1, b] to slots [1, b]; see `model.extend`."""
        width = int(start.max()) + ids.shape[2]
        self._reserve(width)
        chosen = slots[0]
        self._place(chosen)
        told = np.concatenate((start[0][:, None], ids[0]), 1)
        _, which = np.unique(told, axis=0, return_inverse=True)
        label = np.zeros(len(self._uniforms), np.int64)  # whoever is not extended keeps the row
        label[chosen] = which + 1
        live = self._rows.open()
        self._copy(self._rows.split(live, label[live]), int(start.max()))
        row, first = np.unique(self._rows.row[chosen], return_index=True)
        self._step.extend(
            torch.from_numpy(ids[0][first]),
            torch.from_numpy(start[0][first]),
            torch.from_numpy(row),
        )

    def share(self, slots: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """The first of some slots and the others have the same prompt, for each such group of slots."""
        for group, length in zip(slots, lengths, strict=True):
            if len(group) > 1:
                self._rows.join(np.array(group))
                self._step.prompts.add([int(self._rows.row[group[0]])], length)

    def release(self, slots: npt.NDArray[np.int64]) -> None:
        """The sequences in these slots have ended."""
        self._rows.release(slots)

    def step(
        self, token: npt.NDArray[np.int64], position: npt.NDArray[np.int64], width: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Feed token [S] at position [S]; the sampled next token and log-probability [S].

        Every position must be below `width` <= max_len. The random number used is the slot's at position + 1.
        """
        self._reserve(width)
        live = self._rows.open()
        self._place(live)
        label = position[live] * self._vocab_size + token[live]
        self._copy(self._rows.split(live, label), width - 1)
        self._copy(self._rows.close_gaps(), width - 1)
        row = self._rows.row[live]
        fed = np.zeros((2, self._rows.num_rows), np.int64)  # token, position
        fed[:, row] = token[live], position[live]
        given = torch.from_numpy(fed)
        scores = self._step.decode(given[0], given[1], width)
        if len(row) != len(scores) or np.any(row != np.arange(len(row))):
            scores = scores.index_select(0, torch.from_numpy(row))
        drawn, logp = sample_tokens(
            scores,
            torch.full((len(live), 1), self._temperature),
            torch.from_numpy(self._uniforms[live, position[live] + 1]),
            any_greedy=self._temperature == 0,
        )
        tokens, values = np.zeros(len(token), np.int64), np.zeros(len(token), np.float32)
        tokens[live], values[live] = drawn.numpy(), logp.numpy()
        return tokens, values

    def _place(self, slots: npt.NDArray[np.int64]) -> None:
        fresh = self._rows.place(slots)
        if len(fresh):
            self._step.prompts.forget(fresh.tolist())

    def _copy(self, copies: Copies, width: int) -> None:
        if not copies.source:
            return
        cached = self._cache.arrays  # [layers, 2, rows, K, L, d]
        # Rows are few: indexing with all of them at once takes twice as long.
        for source, target in zip(*copies, strict=True):
            cached[:, :, target, :, :width] = cached[:, :, source, :, :width]
        self._step.prompts.move(*copies)

    def _reserve(self, length: int) -> None:
        if length > self._cache.max_len:
            self._cache.grow(min(self._max_len, max(length, 2 * self._cache.max_len)))
