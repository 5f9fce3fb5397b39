"""What a scorer promises: hidden items, its own rules, and weights it has checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nestling.families.splits import HiddenSplit

__all__ = ["Score", "Scorer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One model on n hidden items; item i has the same sampling seed for every model."""

    correct: Sequence[bool]
    """One entry per item, in item order."""
    base_digest: str
    """SHA-256 of the pinned base folder the weights were checked against."""
    weights_hash: str
    """Content hash of the weights that were scored."""
    delta_norm: float
    """Euclidean norm of scored minus base weights."""
    cpu_s: float
    """Processor seconds of this scoring."""

    @property
    def mean(self) -> float:
        """Share of correct items."""
        return sum(self.correct) / len(self.correct)


class Scorer(Protocol):
    """A separate process of ours that holds the secret and never sees agent code."""

    def start(self) -> None:
        """Begin starting, without waiting; may be repeated."""
        ...

    def fingerprint(self) -> str:
        """Changes with anything of ours that may change a score: code, settings, libraries."""
        ...

    def commitment(self, split: HiddenSplit) -> str:
        """Public commitment to the hidden items of a split; says nothing about them."""
        ...

    def score(
        self, model_folder: Path, *, base: str, family: str, split: HiddenSplit, n: int
    ) -> Score:
        """Play the first n hidden items with the weights in `model_folder`.

        Tokenizer, chat markup and generation settings are those of the pinned base named `base`.
        Passing the base's own folder scores it untrained.

        Raises:
            ConfigError: unknown family or base, or a secret that cannot be used.
            JobFailedError: `scorer.refused` (the weights are not those of a trained copy of the
                base), `scorer.timeout`, `scorer.died` (twice on the same request).
            LearnerError: a stack that samples for the scorer is away; the job may be tried again.
        """
        ...

    def close(self) -> None:
        """End the process; may be called twice."""
        ...
