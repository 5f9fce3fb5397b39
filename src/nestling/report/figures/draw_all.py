"""Every figure that a run has numbers for."""

from __future__ import annotations

from collections.abc import Iterator

from nestling.report.figures import choices, held_out, learner, training
from nestling.report.figures.drawing import Drawing
from nestling.report.run_data import RunData

__all__ = ["draw_all"]


def draw_all(data: RunData) -> list[Drawing]:
    """Figures in reading order; one without a single number is left out."""
    return list(_drawn(data))


def _drawn(data: RunData) -> Iterator[Drawing]:
    if data.steps:
        yield training.reward(data)
        yield training.decomposition(data)
        yield training.terms(data)
        yield training.validity(data)
        yield training.scores(data)
        yield training.uplift(data)
        yield choices.base_models(data)
        if any(row.base_share_by_family for row in data.steps):
            yield choices.bases_by_family(data)
        yield choices.config_use(data)
        if any(row.report.summary and row.report.summary.config_key_use for row in data.steps):
            yield choices.config_keys(data)
        yield choices.exploration(data)
        yield training.families(data)
    if data.sweeps:
        yield held_out.rewards(data)
        if any(sweep.comparisons for sweep in data.sweeps.values()):
            yield held_out.gains(data)
    if data.steps:
        yield learner.health(data)
        yield learner.pace(data)
