"""The scorer process with a server that samples for it: vLLM, our own, or any OpenAI-compatible one.

Hidden items, tools, grading and the check of the weights stay in the scorer process; the server gets prompts, and
weights that were checked. So everything that holds for the embedded scorer (deadlines, one restart, what the process
may see) holds here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nestling.core.clock import Clock
from nestling.inner.openai_config import OpenAiConfig
from nestling.inner.scorers.embedded import EmbeddedScorer

__all__ = ["OpenAiScorer"]


class OpenAiScorer(EmbeddedScorer):
    """Satisfies `Scorer`; further reason codes: `scorer.server`, `scorer.request`."""

    def __init__(
        self,
        config: OpenAiConfig,
        *,
        secret_path: Path,
        bases: Mapping[str, Path],
        start_wall_s: float = 300.0,
        score_wall_s: float = 1800.0,
        clock: Clock | None = None,
    ) -> None:
        """`start_wall_s` covers asking the server's program for its version, `score_wall_s` its start."""
        super().__init__(
            secret_path=secret_path,
            bases=bases,
            start_wall_s=start_wall_s,
            score_wall_s=score_wall_s,
            clock=clock,
            openai=config,
        )
