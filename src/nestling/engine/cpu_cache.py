"""Keys and values of one job on a CPU, as tensors and as arrays of the same memory.

Axes: R row, K key/value head, L position, d head. All layers are one piece of memory: numpy asks the system for huge pages
when a piece is large, and reading a cache then misses fewer address translations.
"""

from __future__ import annotations

import numpy as np
import torch

from nestling.engine.config import ModelConfig
from nestling.engine.model import KVCache

__all__ = ["CpuCache"]


class CpuCache(KVCache):
    """A `KVCache` in float32."""

    def __init__(self, config: ModelConfig, num_rows: int, max_len: int) -> None:
        self.num_rows = num_rows
        shape = (config.num_layers, 2, num_rows, config.num_kv_heads, max_len, config.head_dim)
        self._take(np.empty(shape, np.float32), 0)

    def grow(self, max_len: int) -> None:
        """Make every row at least this long; what is cached stays."""
        old = self.arrays
        if max_len <= self.max_len:
            return
        whole = np.empty((*old.shape[:4], max_len, old.shape[5]), np.float32)
        whole[..., : self.max_len, :] = old
        self._take(whole, self.max_len)

    def _take(self, whole: np.ndarray[tuple[int, ...], np.dtype[np.float32]], used: int) -> None:
        whole[..., used:, :] = 0  # what is masked is multiplied by zero, so it has to be a number
        self.max_len = whole.shape[4]
        self.arrays = whole
        """[layers, 2, R, K, L, d]: keys, values."""
        pieces = torch.from_numpy(whole)
        self.keys, self.values = list(pieces[:, 0]), list(pieces[:, 1])
