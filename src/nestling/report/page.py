"""The report of a run: one HTML file that needs nothing beside it, and the numbers as files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from nestling import __version__
from nestling.core.rundir import write_atomic
from nestling.report.arc_data import is_arc_data
from nestling.report.arithmetic import formula_lines
from nestling.report.figures import Drawing, draw_all
from nestling.report.figures.inner_curve import inner_curve
from nestling.report.gather import gather
from nestling.report.headline import held_out_scope
from nestling.report.listings import episode_table, job_table, power_table, step_listing
from nestling.report.power import EFFECT, PowerRow, power_rows
from nestling.report.rendering import environment
from nestling.report.run_data import RunData
from nestling.report.run_info import flatten
from nestling.report.samples import EpisodeDetail, pick_episodes, read_details
from nestling.report.stages import gain_by_stage
from nestling.report.summary import summarise_run
from nestling.report.verdicts import limits, state_line, verdicts

__all__ = ["MAX_LISTED", "render_page", "write_figures", "write_report"]

MAX_LISTED = 400
"""Rows of the job and episode lists on the page; the CSV files have all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """One full episode on the page; `anchor` is ours, so nothing the agent wrote gets into it."""

    anchor: str
    detail: EpisodeDetail
    curve: Drawing | None


def write_report(
    run_folder: Path, out: Path | None = None, *, png: bool = False, effect: float = EFFECT
) -> Path:
    """Write the report of a run, finished or not; returns the page.

    Args:
        run_folder: holds run.db, or the data of an exported run, which has no transcripts; it is
            only read, unless the report goes into it.
        out: the page; its folder also gets `figures/`, the CSV files and `summary.json`. None:
            `report/index.html` in the run folder.
        png: write each figure as PNG too.
        effect: difference in mean reward that the power statement is about.

    Raises `StoreError` when there is no run, it is damaged, or the report cannot be written.
    """
    page = out or run_folder / "report" / "index.html"
    data = gather(run_folder)
    folder = page.parent
    # First, so that a folder that cannot be written is found before anything is drawn.
    _write(folder / "summary.json", summarise_run(data).model_dump_json(indent=2) + "\n")
    details = (
        []
        if is_arc_data(run_folder)
        else read_details(run_folder, pick_episodes(data), data.weights)
    )
    figures = draw_all(data)
    write_figures(folder, figures, png=png)
    _write(folder / "steps.csv", step_listing(data).csv())
    _write(folder / "episodes.csv", episode_table(data).csv())
    _write(folder / "jobs.csv", job_table(data).csv())
    power = power_rows(data, effect)
    _write(folder / "power.csv", power_table(power).csv())
    _write(page, render_page(data, figures, details, power))
    return page


def write_figures(folder: Path, figures: Sequence[Drawing], *, png: bool) -> None:
    """Each figure and its numbers into `figures/` below a folder."""
    for figure in figures:
        _write(folder / "figures" / f"{figure.name}.svg", _standalone(figure))
        _write(folder / "figures" / f"{figure.name}.csv", figure.table.csv())
        if png:
            write_atomic(folder / "figures" / f"{figure.name}.png", figure.png())


def render_page(
    data: RunData,
    figures: Sequence[Drawing],
    details: Sequence[EpisodeDetail],
    power: Sequence[PowerRow],
) -> str:
    """The page as text."""
    episodes = [
        _Shown(anchor=f"full-{index}", detail=detail, curve=_curve(detail, index))
        for index, detail in enumerate(details, start=1)
    ]
    return (
        environment("nestling.report")
        .get_template("page.html")
        .render(
            data=data,
            info=data.info,
            head=data.headline,
            figures=figures,
            pictures={figure.name: Markup(figure.inline) for figure in figures},  # noqa: S704 (ours)
            state=state_line(data),
            verdicts=verdicts(data),
            limits=limits(data),
            formula=formula_lines(data.weights, data.reward_kind),
            config=list(flatten(data.info.config)),
            power=power,
            stages=gain_by_stage(data),
            shown=episodes,
            curves={
                one.anchor: Markup(one.curve.inline)  # noqa: S704 (ours)
                for one in episodes
                if one.curve is not None
            },
            anchors={one.detail.pick.row.id: one.anchor for one in episodes},
            scopes={
                step: held_out_scope(sweep, data.training_families)
                for step, sweep in data.sweeps.items()
            },
            max_listed=MAX_LISTED,
            version=__version__,
        )
    )


def _curve(detail: EpisodeDetail, index: int) -> Drawing | None:
    outcome = detail.result.outcome
    if outcome is None or not outcome.steps:
        return None
    return inner_curve(outcome.steps, f"curve-{index}")


def _standalone(figure: Drawing) -> str:
    """The picture as a file: dark ink on white, whatever program opens it."""
    return figure.svg.replace("<svg ", '<svg style="color:#1f2328;background:#fff" ', 1)


def _write(path: Path, text: str) -> None:
    write_atomic(path, text.encode("utf-8", "replace"))
