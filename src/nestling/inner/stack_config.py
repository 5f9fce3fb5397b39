"""What a person may set about stacks."""

from __future__ import annotations

import re
from typing import Final, Literal

from pydantic import Field, field_validator

from nestling.core.frozen import Frozen

__all__ = ["StackConfig"]

_DEVICE: Final = re.compile(r"cpu|cuda|cuda:\d+")


class StackConfig(Frozen):
    """Processes that hold many jobs as one batch, one or more per device."""

    devices: tuple[str, ...] = ("cpu",)
    """`cpu`, `cuda:0`, ...; `cuda` stands for every GPU of this machine. A job goes
    where the smallest share of lanes is taken; memory decides how many a device has."""
    processes: int = Field(1, ge=1, le=8)
    """Of each device. A GPU waits while a process reads and packs tokens; a second one uses that time."""
    max_jobs: int = Field(8, ge=1, le=256)
    """Jobs of one base model and process that are decoded at the same time; further ones wait."""
    rows_per_job: int = Field(32, ge=1, le=1024)
    """Rollouts of a job at a time; further ones wait for a free row."""
    max_len: int = Field(1024, ge=64, le=32768)
    """Tokens of a rollout at most; a job with a larger seq_len is refused."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Of matrix products. Master weights, log-probabilities and optimisers are float32 always."""
    tile_tokens: int = Field(0, ge=0, le=2**22)
    """Tokens of one training launch; 0: as many as a quarter of the memory holds."""
    memory_gib: float = Field(0.0, ge=0)
    """Of each device, for all its processes; 0: nine tenths of what is free when they start."""

    @field_validator("devices")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        odd = [name for name in value if not _DEVICE.fullmatch(name)]
        if odd or not value:
            raise ValueError(
                f"devices = {list(value)}; expected some of cpu, cuda, cuda:0, cuda:1, ..."
            )
        return value
