"""How hidden items are played; the same for every model, job and family."""

from __future__ import annotations

from typing import Final

from nestling.core.frozen import Frozen

__all__ = ["EVAL_SETTINGS", "EvalSettings"]


class EvalSettings(Frozen):
    """Generation settings of the hidden eval."""

    temperature: float = 1.0
    """Matches on-policy training, and gives no score for merely sharpening a distribution."""
    max_turn_tokens: int = 96
    """Two to three times the longest turn of a demonstration."""
    max_total_tokens: int = 512
    """Prompt, turns and tool results; the longest demonstration needs about half."""
    max_turns: int = 12
    """The longest solution of any family takes nine."""


EVAL_SETTINGS: Final = EvalSettings()
