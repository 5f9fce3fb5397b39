"""The numbers and charts of the first page: does the agent learn, and what does it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from nestling.dash.chart import Line, Point, level_of, line_chart, line_of
from nestling.dash.live_run import RunView
from nestling.outer.stats import Estimate
from nestling.report.run_data import RunData
from nestling.report.shown import duration, number, percent, signed, usd

__all__ = ["Figure", "Tile", "figures", "tiles", "time_left_s"]

_LOOKS = ("a", "b", "c", "d", "e")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One number, what it is, and what to compare it with."""

    name: str
    value: str
    interval: str
    note: str
    look: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart with its heading and what it means."""

    title: str
    note: str
    chart: Markup


def tiles(view: RunView) -> list[Tile]:
    """What one looks for first."""
    data, head = view.data, view.data.headline
    last = data.steps[-1] if data.steps else None
    summary = last.report.summary if last else None
    compared = [f"untrained {number(head.untrained.mean)}"] if head.untrained else []
    compared += [f"no-op {number(head.no_op)}"] if head.no_op is not None else []
    gain = head.held_out_gain
    return [
        _estimate_tile("Reward now", head.final, ", ".join(compared) or "no step is done yet"),
        _estimate_tile(
            "Uplift, last step",
            summary.uplift if summary else None,
            "post − best untrained; a no-op has 0",
            is_gain=True,
        ),
        _estimate_tile(
            "Held-out gain",
            gain,
            f"over {gain.n} pair{'' if gain.n == 1 else 's'}"
            + (f", p = {gain.p_value:.3g}" if gain.p_value is not None else "")
            if gain
            else "no trained checkpoint measured yet",
            is_gain=True,
        ),
        Tile(
            name="Valid, last step",
            value=percent(last.validity.mean if last and last.validity else None),
            interval="",
            note=f"at the first try {percent(summary.first_try_validity if summary else None)}",
        ),
        Tile(
            name="Jobs that trained",
            value=percent(last.job_success.mean if last and last.job_success else None),
            interval="",
            note="of the accepted ones, last step",
        ),
        Tile(name="Cost", value=usd(data.usd), interval="", note=_cost_note(data)),
        _time_tile(view),
    ]


def time_left_s(view: RunView) -> float | None:
    """What the last step said, less the time since; None without a plan or a step."""
    data = view.data
    if not data.steps or data.is_finished is not False:
        return None
    done_at = data.info.last_at or view.at
    return max(0.0, data.steps[-1].report.eta_s - max(0.0, view.at - done_at))


def figures(data: RunData) -> list[Figure]:
    """Charts over outer steps, the most telling first; those without a number are left out."""
    steps = [row.step for row in data.steps]

    def line(label: str, look: str, values: Sequence[Estimate | None]) -> Line:
        return line_of(label, look, list(zip(steps, values, strict=True)))

    summaries = [row.report.summary for row in data.steps]
    reward = [
        line("agent", "a", [one.reward if one else None for one in summaries]),
        *_levels(data),
    ]
    terms = [
        line("validation", "a", [row.validation for row in data.steps]),
        line("quality", "b", [row.quality for row in data.steps]),
        line("speed", "c", [row.speed for row in data.steps]),
    ]
    reliability = [
        line("valid at first try", "c", [row.first_try for row in data.steps]),
        line("valid in the end", "a", [row.validity for row in data.steps]),
        line("job trained", "b", [row.job_success for row in data.steps]),
    ]
    uplift = [line("uplift", "a", [one.uplift if one else None for one in summaries])]
    scores = [
        line("trained (post)", "a", [row.post for row in data.steps]),
        line("best untrained", "b", [row.best_pre for row in data.steps]),
    ]
    weights = data.weights
    found = [
        Figure(
            title="Reward",
            note="Mean over the episodes of each step with its 95 % interval; lines: reference "
            "policies on the same families.",
            chart=line_chart(reward, title="Reward by outer step"),
        ),
        Figure(
            title="Uplift over the best untrained base",
            note="post − best untrained, paired by hidden item, over scored jobs. Above 0: training "
            "really added something.",
            chart=line_chart(uplift, title="Uplift by outer step", zero=True),
        ),
        Figure(
            title="The reward's terms",
            note=f"Before their weights: {weights.validation:g} validation, {weights.quality:g} "
            f"quality, {weights.speed:g} speed.",
            chart=line_chart(terms, title="Terms of the reward by outer step"),
        ),
        Figure(
            title="Valid jobs",
            note="Shares of episodes, and of accepted jobs that trained and were scored.",
            chart=line_chart(
                reliability, title="Validity by outer step", limits=(-0.03, 1.03), digits=2
            ),
        ),
        Figure(
            title="Hidden score of the small models",
            note="The gap between the two lines is the uplift.",
            chart=line_chart(scores, title="Hidden scores by outer step"),
        ),
        Figure(
            title="Reward by family",
            note="Few episodes each, so single points are noisy.",
            chart=line_chart(_families(data), title="Reward by family and outer step"),
        ),
        Figure(
            title="Drift from the first policy",
            note="KL divergence per token, as the learner estimates it.",
            chart=line_chart(_kl(data), title="KL to the initial policy by outer step", digits=4),
        ),
    ]
    return [one for one in found if one.chart]


def _levels(data: RunData) -> list[Line]:
    arms = sorted({arm for row in data.steps for arm in row.references})
    lines = [
        level_of(
            arm,
            [
                Point(x=row.step, mean=row.references[arm])
                for row in data.steps
                if arm in row.references
            ],
        )
        for arm in arms
    ]
    if "noop" not in arms:
        points = [
            Point(x=row.step, mean=row.no_op_formula)
            for row in data.steps
            if row.no_op_formula is not None
        ]
        lines.append(Line(label="no-op (formula)", look="noop", is_level=True, points=points))
    return lines


def _families(data: RunData) -> list[Line]:
    names = sorted({name for row in data.steps for name in row.report.reward_by_family})
    return [
        Line(
            label=name,
            look=_LOOKS[index % len(_LOOKS)],
            points=[
                Point(x=row.step, mean=row.report.reward_by_family[name], n=row.families.get(name))
                for row in data.steps
                if name in row.report.reward_by_family
            ],
        )
        for index, name in enumerate(names)
    ]


def _kl(data: RunData) -> list[Line]:
    points = [
        Point(x=row.step, mean=row.report.update.kl_initial)
        for row in data.steps
        if row.report.update is not None and row.report.update.kl_initial is not None
    ]
    return [Line(label="KL", look="a", points=points)]


def _estimate_tile(name: str, one: Estimate | None, note: str, *, is_gain: bool = False) -> Tile:
    interval, look = "", ""
    if one is not None and one.lo is not None and one.hi is not None:
        interval = f"[{number(one.lo)}, {number(one.hi)}]"
        if is_gain:
            look = "good" if one.lo > 0 else "bad" if one.hi < 0 else ""
    value = (signed if is_gain else number)(one.mean if one else None)
    return Tile(name=name, value=value, interval=interval, note=note, look=look)


def _time_tile(view: RunView) -> Tile:
    data = view.data
    took = duration(data.info.wall_s)
    if not data.is_finished:
        value, note = duration(time_left_s(view)), f"running for {took}"
    elif view.running:
        value, note = (
            "measuring",
            f"all steps are done, {len(view.running)} episodes of a sweep left",
        )
    else:
        value, note = "done", f"took {took}"
    return Tile(name="Time left", value=value, interval="", note=note)


def _cost_note(data: RunData) -> str:
    parts = []
    planned, done = data.info.planned_steps, len(data.steps)
    if data.usd and planned and 0 < done < planned:
        parts.append(f"{usd(data.usd / done * planned)} expected in all")
    if data.usd_reserved:
        parts.append(f"{usd(data.usd_reserved)} reserved")
    minutes = sum(cost.minutes for cost in data.costs)
    if minutes:
        parts.append(f"{duration(60 * minutes)} of machine time")
    return ", ".join(parts) or "of the jobs"
