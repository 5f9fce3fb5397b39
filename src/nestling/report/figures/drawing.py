"""Drawing style, and a drawing as SVG text that may be put into a page.

Colours are those of Okabe and Ito (2008), told apart by people with colour-vision deficiency; lines
also differ in dash and marker. Axes and text take the colour of the surrounding text, so a figure
reads on light and on dark ground.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from nestling.outer.stats import Estimate
from nestling.report.table import Table

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "HEIGHT_IN",
    "ORANGE",
    "PURPLE",
    "SERIES",
    "SKY",
    "VERMILION",
    "WIDTH_IN",
    "Drawing",
    "Series",
    "band",
    "curve",
    "drawing",
    "intervals",
    "label_room_in",
    "legend",
    "panels",
    "steps_axis",
]

BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"
PURPLE, ORANGE, SKY = "#CC79A7", "#E69F00", "#56B4E9"
GREY = "#808080"

WIDTH_IN, HEIGHT_IN = 6.4, 3.3

_INK = "#010203"
"""Stands for the colour of the surrounding text until the drawing is finished."""

_NO_METADATA: dict[str, Any] = {"Software": None}
"""The same figure gives the same bytes, whatever version drew it."""

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nestling",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True, slots=True)
class Series:
    """How one line looks."""

    color: str
    dash: str | tuple[float, tuple[float, ...]]
    marker: str


SERIES = (
    Series(BLUE, "-", "o"),
    Series(VERMILION, "--", "s"),
    Series(GREEN, "-.", "^"),
    Series(PURPLE, ":", "D"),
    Series(ORANGE, (0, (5, 1, 1, 1, 1, 1)), "v"),
    Series(SKY, (0, (7, 2)), "P"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One figure: a picture and the numbers in it."""

    name: str
    """Unique in a report, and its file name."""
    title: str
    caption: str
    """What it shows, with n and how the interval was made."""
    svg: str
    """A whole SVG file."""
    table: Table
    canvas: Canvas = field(repr=False, compare=False)

    def png(self) -> bytes:
        """The picture as pixels, dark ink on white, for programs that read no SVG."""
        buffer = io.BytesIO()
        self.canvas.savefig(buffer, format="png", dpi=160, facecolor="white", metadata=_NO_METADATA)
        return buffer.getvalue()

    @property
    def inline(self) -> str:
        """The picture for an HTML page: no prolog, no namespaces; its ids are unique there."""
        text = self.svg[self.svg.index("<svg") :]
        return text.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)


@contextmanager
def panels(
    rows: int = 1,
    columns: int = 1,
    *,
    height_in: float = HEIGHT_IN,
    left_in: float = 0.68,
    right_in: float = 0.12,
    top_in: float = 0.38,
) -> Iterator[tuple[Canvas, list[Axes]]]:
    """An empty figure in our style with its panels, row by row.

    Margins are given in inches: fitting them to the labels takes as long as drawing.
    """
    with mpl.rc_context(cast("Any", _STYLE)):
        canvas = Canvas(figsize=(WIDTH_IN, height_in))
        FigureCanvasSVG(canvas)
        panel_in = (WIDTH_IN - left_in - right_in) / columns
        all_axes = canvas.subplots(rows, columns, squeeze=False)
        canvas.subplots_adjust(
            left=left_in / WIDTH_IN,
            right=1 - right_in / WIDTH_IN,
            bottom=0.5 / height_in,
            top=1 - top_in / height_in,
            wspace=0.8 / (panel_in - 0.4),
            hspace=0.35,
        )
        yield canvas, [*all_axes.flat]


def drawing(canvas: Canvas, name: str, title: str, caption: str, table: Table) -> Drawing:
    """A finished figure; to be called inside `panels`. The same figure gives the same text."""
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return Drawing(
        name=name,
        title=title,
        caption=caption,
        svg=_tidy(buffer.getvalue(), name, title),
        table=table,
        canvas=canvas,
    )


def legend(axes: Axes, *, more: Sequence[Axes] = ()) -> None:
    """What the lines are, above the panel so that it hides none; nothing without lines.

    `more`: axes that share the panel.
    """
    handles, labels = axes.get_legend_handles_labels()
    for other in more:
        more_handles, more_labels = other.get_legend_handles_labels()
        handles += more_handles
        labels += more_labels
    if handles:
        axes.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(-0.01, 0.99),
            ncols=len(handles),
            borderaxespad=0.2,
            columnspacing=1.2,
            handlelength=2.4,
        )


def steps_axis(axes: Axes, steps: Sequence[int], label: str = "outer step") -> None:
    """Whole numbers on the x axis, with room around a single step."""
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))
    if steps:
        margin = max(0.5, 0.02 * (max(steps) - min(steps)))
        axes.set_xlim(min(steps) - margin, max(steps) + margin)


def curve(
    axes: Axes,
    steps: Sequence[int],
    values: Sequence[float | None],
    label: str,
    look: Series,
) -> None:
    """Values as a line; steps without one are left out, and nothing is drawn when all are."""
    known = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    if known:
        axes.plot(
            [step for step, _ in known],
            [value for _, value in known],
            color=look.color,
            linestyle=look.dash,
            marker=look.marker,
            markevery=max(1, len(known) // 12),
            label=label,
        )


def band(
    axes: Axes,
    steps: Sequence[int],
    estimates: Sequence[Estimate | None],
    label: str,
    look: Series,
) -> None:
    """Means as a line and their intervals as a band; steps without an estimate are left out."""
    shown = [(step, one) for step, one in zip(steps, estimates, strict=True) if one is not None]
    if not shown:
        return
    curve(axes, [step for step, _ in shown], [one.mean for _, one in shown], label, look)
    sure = [
        (step, one.lo, one.hi) for step, one in shown if one.lo is not None and one.hi is not None
    ]
    if len(sure) > 1:
        xs, lows, highs = zip(*sure, strict=True)
        axes.fill_between(xs, lows, highs, color=look.color, alpha=0.18, linewidth=0)
    elif sure:
        at, low, high = sure[0]
        axes.vlines([at], [low], [high], color=look.color, alpha=0.5)


def intervals(axes: Axes, rows: Sequence[tuple[str, Estimate, str]], *, zero: bool = True) -> None:
    """Means as dots with their intervals, one row each from the top: label, estimate, colour."""
    for index, (_, one, color) in enumerate(reversed(rows)):
        axes.plot([one.mean], [index], marker="o", linestyle="", color=color)
        if one.lo is not None and one.hi is not None:
            axes.hlines([index], [one.lo], [one.hi], color=color)
    if zero:
        axes.axvline(0.0, color=GREY, linewidth=1.2, linestyle="--")
    axes.set_yticks(range(len(rows)), [label for label, _, _ in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)


def label_room_in(labels: Sequence[str]) -> float:
    """Width of these labels beside `intervals`."""
    return 0.3 + 0.08 * max((len(label) for label in labels), default=0)


def _tidy(svg: str, name: str, title: str) -> str:
    """No prolog, no document type, no metadata; ids that no other figure has; text-coloured ink."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
    svg = svg.replace("xlink:href=", "href=")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = svg.replace(_INK, "currentColor")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
