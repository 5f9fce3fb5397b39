"""Sections on single runs: the arc and its seeds, measurements made apart, other held-out families."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nestling.report import shown
from nestling.report.headline import held_out_scope
from nestling.report.paired import by_task, paired_gain
from nestling.report.power import power_rows
from nestling.report.published.found import Found
from nestling.report.published.markdown import NOT_RUN, gain, mean, table
from nestling.report.published.plan import ArcPlan
from nestling.report.reference_rows import is_checkpoint
from nestling.report.run_data import RunData
from nestling.report.stages import gain_by_stage

__all__ = ["arc_section", "left_out_section", "sweep_section"]

_UNTRAINED: Final = "untrained"
_NOOP: Final = "noop"


def arc_section(plan: ArcPlan, data: RunData) -> list[str]:
    """One run with its figures, its gain by part and its held-out table."""
    info = data.info
    lines = [
        f"## {plan.title}",
        "",
        f"`nestling run {plan.recipe}`, commit {info.commit or 'not recorded'}, {info.machine or 'machine not recorded'},",
        f"{shown.duration(info.wall_s)} from first to last event. Figures: [arc/{plan.name}/figures](arc/{plan.name}/figures).",
    ]
    for name, text in (
        ("reward", "Reward by outer step"),
        ("decomposition", "What the reward is paid for"),
        ("held_out", "Held-out reward by checkpoint"),
    ):
        if data.steps and (name != "held_out" or data.sweeps):
            lines += ["", f"![{text}](arc/{plan.name}/figures/{name}.svg)"]
    stages = gain_by_stage(data)
    if stages:
        rows = [
            [
                name.replace("_", " "),
                *(shown.estimate(getattr(stage.account, name)) for stage in stages),
            ]
            for name, _ in stages[0].account.parts()
        ]
        columns = ["part of the reward's difference", *(stage.label for stage in stages)]
        lines += ["", *table(columns, rows)]
    held_out = list(_checkpoints(data))
    if held_out:
        columns = [
            "held out",
            "reward",
            "valid",
            "jobs scored",
            "worst",
            "minus untrained",
            "minus no-op",
        ]
        lines += ["", *table(columns, held_out)]
    return [*lines, *_power(data)]


def sweep_section(plan: ArcPlan, data: RunData) -> list[str]:
    """Arms of `nestling eval-agent`, each with its gain over the no-op."""
    arms = sorted({one.arm for one in data.episodes if one.arm is not None})
    families = sorted({one.family for one in data.episodes})
    rows = []
    for arm in arms:
        tasks = by_task(data.episodes, arm, families)
        reward = sum(one.reward for one in tasks.values()) / len(tasks)
        versus = (
            ""
            if arm == _NOOP
            else gain(paired_gain(tasks, by_task(data.episodes, _NOOP, families)))
        )
        rows.append([arm, shown.number(reward), str(len(tasks)), versus])
    return [
        f"## Measured apart: {plan.title}",
        "",
        f"Families: {', '.join(families)}. Every agent met the same tasks and seeds.",
        "",
        *table(["agent", "mean reward", "n", "gain over no-op"], rows),
        *_power(data),
    ]


def left_out_section(found: Found) -> list[str]:
    """Runs that are no seed of the main experiment."""
    plans = [plan for plan in found.plan.arcs if plan.kind != "arc"]
    if not plans:
        return []
    rows = []
    for plan in plans:
        data = found.arcs.get(plan.name)
        rows.append(
            [plan.title, f"`{plan.recipe}`"]
            + (
                [NOT_RUN] * 4
                if data is None
                else [
                    mean(data.headline.held_out_untrained),
                    mean(data.headline.held_out),
                    gain(data.headline.held_out_gain),
                    mean(data.headline.final),
                ]
            )
        )
    columns = [
        "run",
        "recipe",
        "held out, untrained",
        "held out, trained",
        "gain",
        "training reward, last",
    ]
    return ["## Other held-out families, another agent", "", *table(columns, rows)]


def _checkpoints(data: RunData) -> Iterator[list[str]]:
    """Rows of the held-out table: every arm once, in its newest sweep."""
    rows: dict[str, list[str]] = {}
    for _, sweep in sorted(data.sweeps.items()):
        scope = held_out_scope(sweep, data.training_families)
        if scope is None:
            continue
        for one in sweep.results:
            if one.family != scope or one.summary is None:
                continue
            versus = [sweep.comparison(one.arm, other, scope) for other in (_UNTRAINED, _NOOP)]
            rows[one.arm] = [
                one.arm,
                mean(one.summary.reward),
                shown.percent(one.summary.validity),
                shown.percent(one.summary.job_success),
                shown.number(one.summary.reward_worst),
                *("" if found is None else gain(found.difference) for found in versus),
            ]
    yield from (rows[arm] for arm in sorted(rows, key=lambda arm: (is_checkpoint(arm), arm)))


def _power(data: RunData) -> list[str]:
    rows = [
        [
            f"{one.arm} − {one.against}",
            ", ".join(one.families),
            str(one.difference.n),
            shown.number(one.episode_sd),
            shown.number(one.item_sd),
            shown.number(one.detectable),
            str(one.pairs),
        ]
        for one in power_rows(data)
    ]
    if not rows:
        return []
    columns = [
        "difference",
        "families",
        "pairs",
        "sd episodes",
        "sd items",
        "seen with these",
        "pairs for 0.05",
    ]
    return ["", *table(columns, rows)]
