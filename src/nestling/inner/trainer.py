"""What one inner training run needs and gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nestling.jobs.bundle import Bundle
from nestling.jobs.manifest import JobManifest
from nestling.jobs.outcome import StepRecord, WarmUp

__all__ = ["StepLog", "TrainLimits", "TrainRequest", "TrainResult", "Trainer"]

StepLog = Callable[[StepRecord], None]
"""Called once after every training step, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainLimits:
    """Wall-clock limits of the training stage; the scorer and the jail have their own."""

    wall_s: float = 300.0
    """From opening the environment to the saved model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """One job as a trainer sees it."""

    bundle: Bundle
    manifest: JobManifest
    """Parsed from the bundle."""
    family: str
    base_folder: Path
    """The pinned base model named by the manifest."""
    out_folder: Path
    """Where the trained model is written; created when missing."""
    seed: int
    """Root of every random choice of this run."""
    limits: TrainLimits = field(default_factory=TrainLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """A finished training run."""

    model_folder: Path
    """A whole model folder; its weights are one safetensors file."""
    steps: list[StepRecord]
    base_hash: str
    """Content hash of the weights that training started from."""
    final_hash: str
    """Content hash of the trained weights as they are on disk."""
    delta_norm: float
    """Euclidean norm of trained minus base weights."""
    cpu_s: float
    """Processor seconds of the trainer and of the env worker."""
    warm_up: WarmUp | None = None
    """None: the job has no `[sft]` table."""


class Trainer(Protocol):
    """Trains one job to the end; deterministic for a seed on one machine."""

    def train(self, request: TrainRequest, log: StepLog) -> TrainResult:
        """Blocks until the model is saved.

        Raises:
            JobFailedError: `train.timeout` past the deadline, `train.*` when learning itself
                breaks (for example non-finite weights) or the model cannot be written (`train.disk`, `stack.disk`),
                `env.*` when the job's environment fails.
        """
        ...
