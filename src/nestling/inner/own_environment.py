"""What our own child processes see of this process's environment: what they need, and no key."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

__all__ = ["own_environment"]

_PASSED_ON: Final = (
    "PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER", "CUDA_HOME", "PYTORCH_CUDA_ALLOC_CONF", "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
)  # fmt: skip
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Many of them share a machine, each on a core."""


def own_environment(*more: str) -> dict[str, str]:
    """Names known here and those of `more`, where they are set."""
    kept: Sequence[str] = (*_PASSED_ON, *more)
    return {name: os.environ[name] for name in kept if name in os.environ} | _ONE_THREAD
