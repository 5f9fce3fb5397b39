"""Charts as SVG that stretches with the page while its text stays the same size.

Coordinates are percentages of the plot; only the lines and bands live in a stretched inner drawing,
with strokes that do not scale. Colours come from the style sheet by class, so a chart follows the
page's theme. Every text goes through `Markup.format`, which escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from nestling.outer.stats import Estimate
from nestling.report.shown import number

__all__ = [
    "Line",
    "Point",
    "interval_mark",
    "level_of",
    "line_chart",
    "line_of",
    "share_bar",
    "sparkline",
]

_INNER = 1000.0
"""Side of the stretched inner drawing."""
_ARMS = ("noop", "random", "template", "oracle")
"""Reference policies that have a look of their own."""
_X_TICKS = 7
_Y_TICKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A mean, and its interval where there is one."""

    x: float
    mean: float
    lo: float | None = None
    hi: float | None = None
    n: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line; x values without a point are gaps that are bridged."""

    label: str
    look: str
    """Class in the style sheet: a to e, or noop, random, template, oracle, other for levels."""
    points: Sequence[Point]
    is_level: bool = False
    """A reference: thin, dashed, without dots."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Values to percentages of the plot."""

    low: float
    high: float
    ticks: tuple[float, ...] = ()

    def percent(self, value: float) -> float:
        return 100.0 * (value - self.low) / (self.high - self.low)


def line_of(label: str, look: str, pairs: Sequence[tuple[int, Estimate | None]]) -> Line:
    """A line of estimates by step; steps without one are left out."""
    points = [
        Point(x=step, mean=one.mean, lo=one.lo, hi=one.hi, n=one.n)
        for step, one in pairs
        if one is not None
    ]
    return Line(label=label, look=look, points=points)


def level_of(arm: str, points: Sequence[Point]) -> Line:
    """The level of a reference policy."""
    return Line(label=arm, look=arm if arm in _ARMS else "other", points=points, is_level=True)


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_name: str = "step",
    limits: tuple[float, float] | None = None,
    zero: bool = False,
    digits: int = 3,
) -> Markup:
    """Lines with bands over whole numbers; empty text when no line has a point.

    `limits` fixes the y axis, `zero` draws its zero. Each x value can be pointed at or reached with
    the arrow keys, and then reads out its numbers.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return Markup("")
    xs = sorted({point.x for line in lines for point in line.points})
    margin = max(0.5, 0.02 * (xs[-1] - xs[0]))
    x_axis = _Scale(xs[0] - margin, xs[-1] + margin, tuple(_whole_ticks(xs[0], xs[-1])))
    y_axis = _y_scale(lines, limits, zero)
    inside = [
        *_grid(x_axis, y_axis, zero),
        Markup('<svg class="stretch" viewBox="0 0 1000 1000" preserveAspectRatio="none">'),
        *(_band(line, x_axis, y_axis) for line in lines if not line.is_level),
        *(_path(line, x_axis, y_axis) for line in lines),
        Markup("</svg>"),
        *(dot for line in lines if not line.is_level for dot in _dots(line, x_axis, y_axis)),
        *_hits(lines, xs, x_axis, x_name, digits),
    ]
    return Markup(
        '<div class="chart" tabindex="0" role="group" aria-label="{title}; arrow keys read it out">'
        '{legend}<div class="plot"><svg class="axes" role="img" aria-label="{title}">{inside}</svg>'
        '</div><p class="readout" aria-live="polite">{hint}</p></div>'
    ).format(
        title=title,
        legend=_legend(lines),
        inside=Markup("").join(inside),
        hint=_readout(lines, xs[-1], x_name, digits),
    )


def sparkline(values: Sequence[float], title: str) -> Markup:
    """A small line without axes."""
    if len(values) < 2:
        return Markup("")
    line = Line(label="", look="a", points=[Point(x=i, mean=v) for i, v in enumerate(values)])
    x_axis = _Scale(0.0, float(len(values) - 1))
    y_axis = _y_scale([line], None, False)
    return Markup(
        '<svg class="spark" role="img" aria-label="{title}" viewBox="0 0 1000 1000" '
        'preserveAspectRatio="none">{path}</svg>'
    ).format(title=title, path=_path(line, x_axis, y_axis))


def share_bar(value: float, *, low: float = 0.0, high: float = 1.0, look: str = "a") -> Markup:
    """A bar from zero to a value on a fixed range; negative ones go to the left of zero."""
    scale = _Scale(low, high)
    start, end = sorted((scale.percent(0.0), scale.percent(min(high, max(low, value)))))
    return Markup(
        '<svg class="bar" aria-hidden="true"><rect class="track" width="100%" height="100%"/>'
        '<rect class="fill {look}" x="{start}%" width="{width}%" height="100%"/></svg>'
    ).format(look=look, start=_short(start), width=_short(end - start))


def interval_mark(one: Estimate, low: float, high: float, look: str = "a") -> Markup:
    """A dot with whiskers on a row of its own, and where zero is."""
    scale = _Scale(low, high)
    zero = scale.percent(0.0)
    parts = [
        Markup('<line class="zero" x1="{z}%" x2="{z}%" y1="0" y2="100%"/>').format(z=_short(zero))
    ]
    if one.lo is not None and one.hi is not None:
        parts.append(
            Markup('<line class="whisker {look}" x1="{a}%" x2="{b}%" y1="50%" y2="50%"/>').format(
                look=look, a=_short(scale.percent(one.lo)), b=_short(scale.percent(one.hi))
            )
        )
    parts.append(
        Markup('<circle class="dot {look}" cx="{x}%" cy="50%" r="4"/>').format(
            look=look, x=_short(scale.percent(one.mean))
        )
    )
    return Markup('<svg class="interval" aria-hidden="true">{}</svg>').format(
        Markup("").join(parts)
    )


def _legend(lines: Sequence[Line]) -> Markup:
    entries = [
        Markup(
            '<li class="{look}{level}"><svg class="key" aria-hidden="true">'
            '<line class="stroke {look}{level}" x1="0" x2="100%" y1="50%" y2="50%"/></svg>{label}</li>'
        ).format(look=line.look, level=" level" if line.is_level else "", label=line.label)
        for line in lines
    ]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(entries))


def _grid(x_axis: _Scale, y_axis: _Scale, zero: bool) -> list[Markup]:
    parts = []
    for tick in y_axis.ticks:
        is_zero = zero and abs(tick) < 1e-12
        parts.append(
            Markup(
                '<line class="{kind}" x1="0" x2="100%" y1="{y}%" y2="{y}%"/>'
                '<text class="tick y" x="0" dx="-8" y="{y}%" dy="0.35em">{text}</text>'
            ).format(
                kind="zero" if is_zero else "grid",
                y=_short(100 - y_axis.percent(tick)),
                text=_tick_text(tick),
            )
        )
    parts += [
        Markup('<text class="tick x" x="{x}%" y="100%" dy="1.35em">{text}</text>').format(
            x=_short(x_axis.percent(tick)), text=_tick_text(tick)
        )
        for tick in x_axis.ticks
    ]
    return parts


def _band(line: Line, x_axis: _Scale, y_axis: _Scale) -> Markup:
    sure = [
        (one.x, one.lo, one.hi) for one in line.points if one.lo is not None and one.hi is not None
    ]
    if not sure:
        return Markup("")
    upper = [_spot(x, hi, x_axis, y_axis) for x, _, hi in sure]
    lower = [_spot(x, lo, x_axis, y_axis) for x, lo, _ in reversed(sure)]
    if len(sure) == 1:
        return Markup('<path class="whisker {look}" d="M{top}L{bottom}"/>').format(
            look=line.look, top=upper[0], bottom=lower[0]
        )
    return Markup('<path class="band {look}" d="M{d}Z"/>').format(
        look=line.look, d="L".join([*upper, *lower])
    )


def _path(line: Line, x_axis: _Scale, y_axis: _Scale) -> Markup:
    spots = [_spot(one.x, one.mean, x_axis, y_axis) for one in line.points]
    if line.is_level and len(spots) == 1:
        height = spots[0].partition(" ")[2]
        spots = [f"0 {height}", f"{_INNER:g} {height}"]
    return Markup('<path class="stroke {look}{level}" d="M{d}"/>').format(
        look=line.look, level=" level" if line.is_level else "", d="L".join(spots)
    )


def _dots(line: Line, x_axis: _Scale, y_axis: _Scale) -> list[Markup]:
    return [
        Markup('<circle class="dot {look}" cx="{x}%" cy="{y}%" r="2.6"/>').format(
            look=line.look,
            x=_short(x_axis.percent(one.x)),
            y=_short(100 - y_axis.percent(one.mean)),
        )
        for one in line.points
    ]


def _hits(
    lines: Sequence[Line], xs: Sequence[float], x_axis: _Scale, x_name: str, digits: int
) -> list[Markup]:
    """One invisible column per x value, as wide as half the way to its neighbours."""
    edges = [0.0]
    edges += [x_axis.percent((a + b) / 2) for a, b in pairwise(xs)]
    edges.append(100.0)
    return [
        Markup(
            '<g class="hit"><rect x="{x}%" width="{w}%" height="100%" data-say="{say}"/>'
            '<line x1="{c}%" x2="{c}%" y1="0" y2="100%"/></g>'
        ).format(
            x=_short(left),
            w=_short(right - left),
            c=_short(x_axis.percent(x)),
            say=_readout(lines, x, x_name, digits),
        )
        for x, (left, right) in zip(xs, pairwise(edges), strict=True)
    ]


def _readout(lines: Sequence[Line], x: float, x_name: str, digits: int) -> str:
    parts = []
    for line in lines:
        found = next((one for one in line.points if one.x == x), None)
        if found is None:
            continue
        text = f"{line.label} {number(found.mean, digits)}"
        if found.lo is not None and found.hi is not None:
            text += f" [{number(found.lo, digits)}, {number(found.hi, digits)}]"
        parts.append(text + (f" n={found.n}" if found.n is not None else ""))
    return f"{x_name} {x:g}: " + " · ".join(parts)


def _y_scale(lines: Sequence[Line], limits: tuple[float, float] | None, zero: bool) -> _Scale:
    if limits is not None:
        low, high = limits
    else:
        values = [
            value
            for line in lines
            for one in line.points
            for value in (one.mean, one.lo, one.hi)
            if value is not None
        ]
        values += [0.0] if zero else []
        low, high = min(values), max(values)
        room = 0.06 * (high - low) or 0.05 * (abs(high) or 1.0)
        low, high = low - room, high + room
    return _Scale(low, high, tuple(_nice_ticks(low, high, _Y_TICKS)))


def _nice_ticks(low: float, high: float, wanted: int) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten inside the range."""
    step = _nice_step((high - low) / wanted)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _whole_ticks(low: float, high: float) -> list[float]:
    if low == high:
        return [low]
    step = max(1, round(_nice_step((high - low) / _X_TICKS)))
    first = math.ceil(low / step)
    return [float(index * step) for index in range(first, math.floor(high / step) + 1)]


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(max(rough, 1e-9)))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)


def _spot(x: float, y: float, x_axis: _Scale, y_axis: _Scale) -> str:
    across = x_axis.percent(x) * _INNER / 100
    down = (100 - y_axis.percent(y)) * _INNER / 100
    return f"{_short(across)} {_short(down)}"


def _tick_text(value: float) -> str:
    return f"{value:.6g}".replace("-", "−")


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
