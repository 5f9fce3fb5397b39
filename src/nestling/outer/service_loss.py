"""Our losses in the words of a Tinker service, for our learner and for the cookbook's loop."""

from __future__ import annotations

from nestling.outer.config import LossKind

__all__ = ["service_loss"]


def service_loss(kind: LossKind, clip: float) -> tuple[str, dict[str, float]]:
    """The service's name of a loss, and its settings: bounds of the ratio itself."""
    if kind == "importance_sampling":
        return "importance_sampling", {}
    return "ppo", {"clip_low_threshold": 1.0 - clip, "clip_high_threshold": 1.0 + clip}
