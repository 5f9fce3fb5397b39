"""What a person should look at, found in the numbers alone. Pure.

Each alert says what was seen, in which numbers, and what it usually means. Thresholds are the
constants below; an alert is a question, not a verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nestling.dash.fleet_facts import FleetFacts
from nestling.outer.stats import Estimate
from nestling.report.run_data import RunData, StepRow
from nestling.report.shown import duration, estimate, percent, usd

__all__ = ["Alert", "find_alerts"]

_LAST_STEPS = 3
"""Steps that recent shares are taken over."""
_CONSTANT_SHARE = 0.5
_DEAD_SHARE = 0.25
_SPEND_SHARE = 0.8
_SILENT_S = 600.0
_LOST_HEARTBEAT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One thing to look at."""

    code: str
    """Stable."""
    level: Literal["serious", "warning", "note"]
    title: str
    text: str
    view: str
    """Page of the run that shows more: a path below it."""


def find_alerts(data: RunData, fleet: FleetFacts, *, now: float, jail: str | None) -> list[Alert]:
    """Serious ones first."""
    found = [
        *_divergence(data),
        *_constant_groups(data),
        *_dead_jobs(data),
        *_broken_episodes(data),
        *_staleness(data),
        *_spend(data, fleet),
        *_fleet(data, fleet, now),
        *_jail(jail),
    ]
    order = {"serious": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda one: order[one.level])


def _divergence(data: RunData) -> Iterator[Alert]:
    """The training reward rose, and what is measured apart from it did not."""
    head = data.headline
    if head.final is None or head.untrained is None or not _above(head.final, head.untrained):
        return
    rise = f"Training reward rose from {estimate(head.untrained)} to {estimate(head.final)}"
    for name, gain in (("held-out", head.held_out_gain), ("measured", head.measured_gain)):
        if gain is None or gain.lo is None or gain.hi is None or gain.lo > 0:
            continue
        fell = gain.hi < 0
        yield Alert(
            code="reward.divergence",
            level="serious" if fell else "warning",
            title=f"Reward and {name} evaluation part ways",
            text=f"{rise}, while the {name} gain over the untrained agent is "
            f"{estimate(gain)} over {gain.n} pairs. "
            + (
                "It fell: the agent learns something that only the training pays for."
                if fell
                else "Its interval covers 0: more measured episodes would tell."
            ),
            view="held-out",
        )


def _constant_groups(data: RunData) -> Iterator[Alert]:
    last = data.steps[-_LAST_STEPS:]
    total = sum(_num_groups(row) for row in last)
    constant = sum(row.report.groups.constant for row in last)
    skipped = sum(row.report.skipped for row in last)
    if skipped:
        yield Alert(
            code="groups.no_update",
            level="serious",
            title="Steps without an update",
            text=f"{skipped} of {_the_last(last)} had no group to learn from, so the agent "
            f"did not change. All rewards of a group being equal is the usual cause: raise the "
            f"temperature or the group size, or look for a term that always pays the same.",
            view="steps",
        )
    elif total and constant / total >= _CONSTANT_SHARE:
        yield Alert(
            code="groups.constant",
            level="warning",
            title="Most groups teach nothing",
            text=f"In {constant} of {total} groups of {_the_last(last)} every reward was "
            f"equal; they are left out. The update rests on the others.",
            view="steps",
        )


def _dead_jobs(data: RunData) -> Iterator[Alert]:
    steps = {row.step for row in data.steps[-_LAST_STEPS:]}
    accepted = [one for one in data.train_episodes if one.step in steps and one.is_valid]
    dead = [one for one in accepted if not one.is_job_done]
    if accepted and len(dead) / len(accepted) >= _DEAD_SHARE:
        reasons = Counter(one.detail or one.outcome_code for one in dead).most_common(3)
        listed = ", ".join(f"{reason[:60]} ({count})" for reason, count in reasons)
        yield Alert(
            code="jobs.dead",
            level="warning",
            title="Accepted jobs die",
            text=f"{len(dead)} of {len(accepted)} accepted jobs of {_the_last(steps)} "
            f"({percent(len(dead) / len(accepted))}) were not scored: {listed}.",
            view="episodes?outcome=job_failed",
        )


def _broken_episodes(data: RunData) -> Iterator[Alert]:
    broken = sum(row.report.dead_episodes for row in data.steps) or data.failed_episodes
    if broken:
        yield Alert(
            code="episodes.broken",
            level="warning",
            title="Episodes broke down through no decision of the agent",
            text=f"{broken} episodes have no reward and are in no mean. The worker logs in the run "
            f"folder say why.",
            view="fleet",
        )


def _staleness(data: RunData) -> Iterator[Alert]:
    bound = _setting(data.info.config, "outer", "max_staleness")
    last = data.steps[-_LAST_STEPS:]
    over = sum(row.report.groups.over_stale for row in last)
    dropped = sum(row.report.groups.dropped for row in last)
    worst = max((row.report.staleness_max for row in last), default=0)
    if over or dropped or (isinstance(bound, int) and worst > bound):
        limit = f" (bound {bound})" if isinstance(bound, int) else ""
        yield Alert(
            code="staleness.over",
            level="warning",
            title="Episodes are staler than planned",
            text=f"Up to {worst} training steps between playing and learning{limit} in "
            f"{_the_last(last)}; {over} groups were used all the same, {dropped} were dropped. "
            f"Fewer parallel episodes or more workers help.",
            view="steps",
        )


def _spend(data: RunData, fleet: FleetFacts) -> Iterator[Alert]:
    cap = _setting(data.info.config, "budget", "run_usd")
    spent = data.usd or 0.0
    if fleet.refused:
        yield Alert(
            code="money.refused",
            level="serious",
            title="A spending cap refused work",
            text=f"{fleet.refused} dispatches were refused because they would pass a cap. "
            f"{usd(spent)} is spent and {usd(data.usd_reserved)} reserved.",
            view="fleet",
        )
    if not isinstance(cap, int | float) or cap <= 0:
        return
    used = spent + data.usd_reserved
    planned, done = data.info.planned_steps, len(data.steps)
    expected = spent / done * planned if planned and done else None
    if used / cap >= _SPEND_SHARE:
        yield Alert(
            code="money.near_cap",
            level="warning",
            title="Most of the money is used",
            text=f"{usd(used)} of {usd(float(cap))} is spent or reserved ({percent(used / cap)}).",
            view="fleet",
        )
    elif expected is not None and expected > cap:
        yield Alert(
            code="money.will_pass_cap",
            level="warning",
            title="The plan costs more than the cap",
            text=f"At the cost so far, {planned} steps take {usd(expected)}; the cap is "
            f"{usd(float(cap))}.",
            view="fleet",
        )


def _fleet(data: RunData, fleet: FleetFacts, now: float) -> Iterator[Alert]:
    lost = [
        one
        for one in fleet.workers
        if one.heartbeat_at is not None and now - one.heartbeat_at > _LOST_HEARTBEAT_S
    ]
    last_at = data.info.last_at
    if lost:
        yield Alert(
            code="fleet.no_heartbeat",
            level="warning",
            title="Workers are silent",
            text=f"{len(lost)} workers hold a job but have not been heard of for more than "
            f"{_LOST_HEARTBEAT_S:.0f} s. If the run was stopped, continue it with "
            f"`nestling run --resume`; a resumed run gives their jobs to others.",
            view="fleet",
        )
    elif data.is_finished is False and last_at is not None and now - last_at > _SILENT_S:
        yield Alert(
            code="run.silent",
            level="note",
            title="Nothing has happened for a while",
            text=f"The last event was {duration(now - last_at)} ago and the plan is not done. If the "
            f"run was stopped, continue it with `nestling run --resume`.",
            view="fleet",
        )
    if fleet.num_queued and not fleet.num_alive and not lost:
        yield Alert(
            code="fleet.no_workers",
            level="note",
            title="Jobs wait and there is no worker",
            text=f"{fleet.num_queued} in the queue, and no worker is on record. In a run that is over "
            f"they will not be done.",
            view="fleet",
        )


def _jail(jail: str | None) -> Iterator[Alert]:
    if jail == "none":
        yield Alert(
            code="jail.none",
            level="serious",
            title="Agent code runs without a jail",
            text="The run was started with --unsafe-no-jail: what the agent writes can do whatever "
            "you can do on that machine, and its scores can be forged.",
            view="",
        )


def _above(first: Estimate, second: Estimate) -> bool:
    return first.lo is not None and second.hi is not None and first.lo > second.hi


def _the_last(steps: Collection[object]) -> str:
    return "the last step" if len(steps) == 1 else f"the last {len(steps)} steps"


def _num_groups(row: StepRow) -> int:
    counts = row.report.groups
    return counts.used + counts.constant + counts.short + counts.dropped


def _setting(config: Mapping[str, Any], table: str, name: str) -> Any:  # noqa: ANN401 (TOML)
    found = config.get(table)
    return found.get(name) if isinstance(found, Mapping) else None
