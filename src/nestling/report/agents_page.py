"""Several agents on one page: rewards with their terms, paired gains, and what n could show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from nestling import __version__
from nestling.core.rundir import write_atomic
from nestling.outer.stats import Estimate, Power, power
from nestling.outer.sweep_report import ALL_FAMILIES, ArmResult, Comparison, Sweep
from nestling.report.figures.drawing import (
    BLUE,
    Drawing,
    drawing,
    intervals,
    label_room_in,
    panels,
)
from nestling.report.rendering import environment
from nestling.report.shown import visible
from nestling.report.table import Table, estimate_cells, estimate_columns

__all__ = ["ComparedAgent", "agents_page", "write_agents_page"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedAgent:
    """One agent of a sweep, as the reader knows it."""

    label: str
    arm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    label: str
    family: str
    result: ArmResult
    gain: Comparison | None
    power: Power | None


def write_agents_page(
    found: Sweep,
    agents: Sequence[ComparedAgent],
    out: Path,
    *,
    against: str,
    effect: float,
    facts: Mapping[str, str],
) -> Path:
    """Write the page; returns its path. `StoreError` when it cannot be written.

    Args:
        found: holds every arm in `agents`.
        agents: in the order in which they are shown.
        out: the HTML file; it needs nothing beside it.
        against: label of the agent that gains are counted from.
        effect: difference in mean reward that the power statement is about.
        facts: what was compared and how: name to text.
    """
    page = agents_page(found, agents, against=against, effect=effect, facts=facts)
    write_atomic(out, page.encode("utf-8", "replace"))
    return out


def agents_page(
    found: Sweep,
    agents: Sequence[ComparedAgent],
    *,
    against: str,
    effect: float,
    facts: Mapping[str, str],
) -> str:
    """The page as text; the arguments are those of `write_agents_page`."""
    reference = next(agent.arm for agent in agents if agent.label == against)
    families = list(dict.fromkeys(one.family for one in found.results))
    real = [family for family in families if family != ALL_FAMILIES]
    scopes = real if len(real) == 1 else [ALL_FAMILIES, *real]
    rows = [_row(found, agent, family, reference, effect) for family in scopes for agent in agents]
    pooled = [row for row in rows if row.family == scopes[0]]
    figures = [_rewards(pooled), _gains(pooled, against)]
    return (
        environment("nestling.report")
        .get_template("agents.html")
        .render(
            rows=rows,
            pooled=pooled,
            scopes=scopes,
            against=against,
            effect=effect,
            facts=facts,
            figures=figures,
            pictures={figure.name: Markup(figure.inline) for figure in figures},  # noqa: S704 (ours)
            version=__version__,
        )
    )


def _row(found: Sweep, agent: ComparedAgent, family: str, reference: str, effect: float) -> _Row:
    gain = found.comparison(agent.arm, reference, family)
    return _Row(
        label=agent.label,
        family=family,
        result=found.result(agent.arm, family),
        gain=gain,
        power=power(gain.difference, effect) if gain else None,
    )


def _rewards(rows: Sequence[_Row]) -> Drawing:
    shown_rows = [(row.label, row.result.summary.reward) for row in rows if row.result.summary]
    return _dots(
        shown_rows,
        "rewards",
        "Reward",
        "Mean reward with 95 % intervals. All agents met the same tasks and seeds, so judge by the "
        "paired gains, not by the overlap of these intervals.",
        "mean reward",
    )


def _gains(rows: Sequence[_Row], against: str) -> Drawing:
    shown_rows = [(row.label, row.gain.difference) for row in rows if row.gain]
    return _dots(
        shown_rows,
        "gains",
        f"Gain over {against}",
        f"Mean paired difference in reward to {against}, with 95 % bootstrap intervals.",
        "difference in reward",
        zero=True,
    )


def _dots(
    rows: Sequence[tuple[str, Estimate]],
    name: str,
    title: str,
    caption: str,
    axis: str,
    *,
    zero: bool = False,
) -> Drawing:
    labels = [_short(label) for label, _ in rows]
    left_in = label_room_in(labels)
    with panels(height_in=0.9 + 0.3 * len(rows), left_in=left_in, top_in=0.12) as (canvas, [axes]):
        marks = zip(labels, rows, strict=True)
        intervals(axes, [(label, value, BLUE) for label, (_, value) in marks], zero=zero)
        axes.set_xlabel(axis)
        cells = [(label, *estimate_cells(value)) for label, value in rows]
        table = Table(columns=("agent", *estimate_columns(name)), rows=cells)
        return drawing(canvas, name, title, caption, table)


def _short(label: str) -> str:
    """Room for 40 characters; the end of a path or of a model's name says most."""
    text = visible(label)
    return text if len(text) <= 40 else "…" + text[-39:]
