"""The rubrics that demonstrations are drawn from: good, half-good, harmful and plainly refused.

Each is written as it stands in a job's `taskset.py`, inside class Task.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

__all__ = ["RUBRICS", "Rubric", "draw_rubric", "render_rubric"]

_METHODS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "correct": "return float(parse_answer(trace.last_reply) == self.data.answer)",
        "well_formed": "return float(parse_answer(trace.last_reply) is not None)",
        "tool_use": (
            "return max(0.0, 1.0 - abs(trace.state.calls - self.data.num_calls)"
            " / self.data.num_calls)"
        ),
        "contains": "return float(self.data.answer in trace.last_reply)",
        "busy": "return min(trace.state.calls, 10) / 10",
        "brief": "return -0.05 * trace.state.calls",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """A weighted choice of reward methods."""

    name: str
    parts: tuple[tuple[str, tuple[float, ...]], ...]
    """Method name and the weights it may have."""
    share: float
    """How often the demonstrator picks it."""
    is_refused: bool = False
    """The probe turns it down: the right answer does not beat the rest."""


RUBRICS: Final[Mapping[str, Rubric]] = MappingProxyType(
    {
        rubric.name: rubric
        for rubric in (
            Rubric(name="exact", parts=(("correct", (1.0,)),), share=0.15),
            Rubric(
                name="shaped",
                parts=(("correct", (1.0,)), ("well_formed", (0.1, 0.2)), ("tool_use", (0.1,))),
                share=0.07,
            ),
            Rubric(
                name="formed", parts=(("correct", (1.0,)), ("well_formed", (0.1, 0.2))), share=0.09
            ),
            Rubric(name="lenient", parts=(("contains", (1.0,)),), share=0.13),
            Rubric(name="brief", parts=(("correct", (1.0,)), ("brief", (1.0,))), share=0.11),
            Rubric(
                name="mostly_format",
                parts=(("correct", (0.1, 0.2)), ("well_formed", (0.8, 1.0))),
                share=0.13,
            ),
            Rubric(
                name="mostly_calls",
                parts=(("correct", (0.4,)), ("busy", (0.3, 0.35))),
                share=0.11,
            ),
            Rubric(name="format", parts=(("well_formed", (1.0,)),), share=0.11, is_refused=True),
            Rubric(name="calls", parts=(("busy", (1.0,)),), share=0.10, is_refused=True),
        )
    }
)
"""By name. Shares sum to 1."""


def draw_rubric(rng: random.Random) -> Rubric:
    """One rubric by its share."""
    return rng.choices(list(RUBRICS.values()), [rubric.share for rubric in RUBRICS.values()])[0]


def render_rubric(rubric: Rubric, rng: random.Random) -> str:
    """The methods as indented source lines, with weights drawn from the rubric."""
    methods = [
        f"    @vf.reward(weight={rng.choice(weights)})\n"
        f"    async def {name}(self, trace):\n"
        f"        {_METHODS[name]}\n"
        for name, weights in rubric.parts
    ]
    return "\n".join(methods)
