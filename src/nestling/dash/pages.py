"""Views of a run as HTML text. Everything goes through templates that escape by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from nestling import __version__
from nestling.dash import chart, overview
from nestling.dash.chart import Line, Point, level_of, line_chart, line_of
from nestling.dash.listing import Asked, list_episodes
from nestling.dash.live_run import RunView
from nestling.dash.step_groups import groups_of, mean_reward, waiting_groups
from nestling.dash.story import Story, said_in
from nestling.outer.heldout import UNTRAINED
from nestling.outer.stats import Estimate
from nestling.outer.sweep_report import Sweep
from nestling.report import shown
from nestling.report.arithmetic import formula_lines, reward_lines
from nestling.report.headline import held_out_scope, last_checkpoint
from nestling.report.reference_rows import is_checkpoint
from nestling.report.rendering import environment
from nestling.report.run_data import RunData
from nestling.report.run_info import flatten
from nestling.report.verdicts import limits, state_line, verdicts

__all__ = ["VIEWS", "Pages", "RunLine"]

VIEWS: Mapping[str, str] = {
    "": "Overview",
    "steps": "Steps",
    "episodes": "Episodes",
    "fleet": "Fleet",
    "held-out": "Held-out",
    "alerts": "Alerts",
}
"""Path below the run to heading, in the order of the navigation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """One run in the list of runs; `view` is None when it cannot be read, and `error` says why."""

    key: str
    view: RunView | None
    error: str = ""


class Pages:
    """The templates, ready to render."""

    def __init__(self) -> None:
        self._environment = environment("nestling.dash")
        self._environment.filters.update(
            clock=_clock,
            spaced=lambda text: str(text).replace("_", " "),
            part=lambda text: quote(str(text), safe="/"),
        )
        self._environment.tests["checkpoint"] = is_checkpoint
        self._environment.globals.update(
            views=VIEWS,
            version=__version__,
            share_bar=chart.share_bar,
            interval_mark=chart.interval_mark,
        )

    def runs(self, lines: Sequence[RunLine]) -> str:
        """Every run of the folder."""
        sparks = {
            one.key: chart.sparkline(
                [
                    row.report.summary.reward.mean
                    for row in one.view.data.steps
                    if row.report.summary
                ],
                "reward by step",
            )
            for one in lines
            if one.view is not None
        }
        return self._render("runs.html", lines=lines, sparks=sparks, state_line=state_line)

    def overview(self, view: RunView) -> str:
        """Does it learn, what does it cost, what just happened."""
        data = view.data
        return self._of_run(
            "overview.html",
            view,
            "",
            state=state_line(data),
            tiles=overview.tiles(view),
            figures=overview.figures(data),
            verdicts=verdicts(data),
            limits=limits(data),
            latest=list(reversed(data.episodes))[:8],
            config=list(flatten(data.info.config)),
        )

    def steps(self, view: RunView) -> str:
        """Every step, newest first, and the groups that no step has used yet."""
        return self._of_run("steps.html", view, "steps", waiting=waiting_groups(view))

    def step(self, view: RunView, number: int) -> str | None:
        """The groups of a step; None when there is no such step."""
        row = next((one for one in view.data.steps if one.step == number), None)
        if row is None:
            return None
        found = groups_of(view, row)
        known = [one.step for one in view.data.steps]
        return self._of_run(
            "step.html",
            view,
            "steps",
            row=row,
            summary=row.report.summary,
            groups=found,
            before=number - 1 if number - 1 in known else None,
            after=number + 1 if number + 1 in known else None,
        )

    def episodes(self, view: RunView, asked: Asked) -> str:
        """The list of episodes."""
        all_rows = view.data.episodes
        return self._of_run(
            "episodes.html",
            view,
            "episodes",
            asked=asked,
            listed=list_episodes(all_rows, asked),
            families=sorted({one.family for one in all_rows}),
            outcomes=sorted({one.outcome_code for one in all_rows}),
            purposes=sorted({one.arm for one in all_rows if one.arm}),
            steps=sorted({one.step for one in all_rows if one.step is not None}),
        )

    def episode(self, view: RunView, story: Story) -> str:
        """One episode in full."""
        group_id = story.record.group_id
        members = [one for one in view.data.episodes if one.group_id == group_id]
        places = [one.id for one in members]
        here = places.index(story.record.id) if story.record.id in places else None
        result = story.result
        outcome = result.outcome if result else None
        return self._of_run(
            "episode.html",
            view,
            "episodes",
            story=story,
            result=result,
            outcome=outcome,
            row=members[here] if here is not None else None,
            members=members,
            group_mean=mean_reward(members),
            before=places[here - 1] if here else None,
            after=places[here + 1] if here is not None and here + 1 < len(places) else None,
            arithmetic=reward_lines(result, view.data.weights) if result else [],
            curve=_inner_curve(story),
            samples=[
                (title, [(said_in(one), one.reward) for one in record.samples])
                for title, record in _sampled(story)
            ],
        )

    def fleet(self, view: RunView) -> str:
        """Workers, queue, money."""
        data = view.data
        money = [
            Point(x=row.step, mean=usd) for row, usd in zip(data.steps, _usd(data), strict=True)
        ]
        budget = data.info.config.get("budget")
        return self._of_run(
            "fleet.html",
            view,
            "fleet",
            fleet=view.fleet,
            caps=dict(budget) if isinstance(budget, Mapping) else {},
            spend=line_chart(
                [Line(label="jobs, USD so far", look="a", points=money)],
                title="Cost of the jobs by outer step",
                zero=True,
                digits=4,
            )
            if any(point.mean for point in money)
            else "",
            jobs=list(reversed(data.jobs))[:60],
        )

    def held_out(self, view: RunView) -> str:
        """What is measured apart from training."""
        data = view.data
        sweeps = sorted(data.sweeps.items())
        newest = sweeps[-1][1] if sweeps else None
        against, gains = _gains(newest, data.training_families) if newest else (None, [])
        ends = [abs(end) for _, _, one in gains for end in (one.mean, one.lo, one.hi) if end]
        return self._of_run(
            "held_out.html",
            view,
            "held-out",
            head=data.headline,
            chart=_held_out_chart(data),
            sweeps=list(reversed(sweeps)),
            against=against,
            gains=gains,
            reach=1.05 * max(ends, default=1.0),
            newest_step=sweeps[-1][0] if sweeps else None,
        )

    def alerts(self, view: RunView) -> str:
        """What to look at."""
        return self._of_run("alerts.html", view, "alerts")

    def problem(self, status: int, title: str, text: str) -> str:
        """A page that says what went wrong."""
        return self._render("problem.html", status=status, title=title, text=text)

    def _of_run(self, template: str, view: RunView, here: str, **values: object) -> str:
        return self._render(
            template,
            view=view,
            data=view.data,
            base=f"/runs/{quote(view.key, safe='')}",
            here=here,
            formula=formula_lines(view.data.weights, view.data.reward_kind),
            **values,
        )

    def _render(self, template: str, **values: Any) -> str:  # noqa: ANN401 (template values)
        return self._environment.get_template(template).render(**values)


def _inner_curve(story: Story) -> object:
    outcome = story.result.outcome if story.result else None
    if outcome is None or not outcome.steps:
        return ""
    points = [
        Point(
            x=one.step + 1,
            mean=one.reward_mean,
            lo=one.reward_mean - one.reward_std,
            hi=one.reward_mean + one.reward_std,
        )
        for one in outcome.steps
    ]
    return line_chart(
        [Line(label="job's own reward", look="a", points=points)],
        title="Training curve of the job",
        x_name="training step",
    )


def _sampled(story: Story) -> list[tuple[str, Any]]:
    """First and last training step where their rollouts were kept."""
    outcome = story.result.outcome if story.result else None
    kept = [one for one in outcome.steps if one.samples] if outcome else []
    if not kept:
        return []
    found = [("Before training", kept[0])]
    if len(kept) > 1:
        found.append(("In its last training step", kept[-1]))
    return found


def _usd(data: RunData) -> list[float]:
    """Cost of the jobs of all steps up to each one."""
    by_step: dict[int, float] = {}
    for one in data.train_episodes:
        if one.step is not None:
            by_step[one.step] = by_step.get(one.step, 0.0) + one.job_usd
    total, found = 0.0, []
    for row in data.steps:
        total += by_step.get(row.step, 0.0)
        found.append(total)
    return found


def _held_out_chart(data: RunData) -> object:
    """The agent's reward on the held-out families by checkpoint, the reference arms as levels."""
    agent: list[tuple[int, Estimate | None]] = []
    arms: dict[str, float] = {}
    for step, sweep in sorted(data.sweeps.items()):
        scope = held_out_scope(sweep, data.training_families)
        if scope is None:
            continue
        own = last_checkpoint(sweep) or UNTRAINED
        for one in sweep.results:
            if one.family != scope or one.summary is None:
                continue
            if one.arm == own:
                agent.append((step, one.summary.reward))
            elif one.arm != UNTRAINED and not is_checkpoint(one.arm):
                arms[one.arm] = one.summary.reward.mean
    if not agent:
        return ""
    steps = [step for step, _ in agent]
    levels = [
        level_of(arm, [Point(x=step, mean=mean) for step in steps])
        for arm, mean in sorted(arms.items())
    ]
    return line_chart(
        [line_of("agent", "a", agent), *levels],
        title="Held-out reward by checkpoint",
        x_name="after step",
    )


def _gains(
    sweep: Sweep, training: Sequence[str]
) -> tuple[str | None, list[tuple[str, str, Estimate]]]:
    """What was compared with, and arm, family and paired difference to it.

    That is the untrained agent where it was measured. Held-out families come first, and in each
    the agent.
    """
    names = list(dict.fromkeys(one.against for one in sweep.comparisons))
    against = UNTRAINED if UNTRAINED in names else next(iter(names), None)
    found = [one for one in sweep.comparisons if one.against == against]
    found.sort(key=lambda one: (one.family in training, not is_checkpoint(one.arm)))
    families = list(dict.fromkeys(one.family for one in found))
    found.sort(key=lambda one: families.index(one.family))
    return against, [(one.arm, one.family, one.difference) for one in found]


def _clock(seconds: float | None) -> str:
    """Time of day in UTC."""
    return shown.moment(seconds)[11:16] if seconds is not None else shown.number(None)
