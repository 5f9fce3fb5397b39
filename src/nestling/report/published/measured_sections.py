"""Sections on what was measured beside the arcs."""

from __future__ import annotations

from collections.abc import Sequence

from nestling.report import shown
from nestling.report.published.found import Found
from nestling.report.published.markdown import NOT_RUN, table

__all__ = [
    "agents_section",
    "benchmarks_section",
    "best_jobs_section",
    "pilots_section",
    "spread_section",
]


def pilots_section(found: Found) -> list[str]:
    """Runs of which only the steps were kept."""
    rows = []
    for folder, steps in sorted(found.steps.items()):
        rewards = [row["reward_mean"] for row in steps if row.get("reward_mean") is not None]
        known = [one for one in rewards if one is not None]
        episodes = sum(int(row["episodes"] or 0) for row in steps)
        rows.append(
            [
                f"[{folder}]({folder})",
                str(len(steps)),
                str(episodes),
                shown.number(_average(known[:5])),
                shown.number(_average(known[-5:])),
                f"[figure]({folder}/figures/reward.svg)",
            ]
        )
    if not rows:
        return []
    return [
        "## Pilots and first looks",
        "",
        "Training reward, mean of step means, one seed each: trends, not tests. What was asked, what went wrong and what it",
        "cost is written beside the data.",
        "",
        *table(["run", "steps", "episodes", "first five steps", "last five", ""], rows),
    ]


def spread_section(found: Found) -> list[str]:
    """What jobs of known worth earn."""
    if found.spread is None:
        return ["## Good and bad jobs", "", f"`nestling bench spread`: {NOT_RUN}."]
    rows = [
        [
            name,
            _signed_ends(one["uplift_mean"], one["uplift_ci"]),
            str(one["families"]),
            shown.number(one["cpu_s_mean"], 1),
        ]
        for name, one in found.spread["figures"]["uplift_by_job"].items()
    ]
    below = found.spread["figures"].get("not_below_template") or []
    tail = f"Not below the template: {', '.join(below)}." if below else ""
    return [
        "## Good and bad jobs",
        "",
        f"`{found.spread['command']}`, commit {found.spread['commit']}. Uplift over the best untrained base, mean over families "
        "with a t interval over them ([by family](bench/figures/spread.svg)).",
        tail,
        "",
        *table(["job", "uplift", "families", "CPU s"], rows),
    ]


def best_jobs_section(found: Found) -> list[str]:
    """Whether choosing by family pays."""
    if not found.best_jobs:
        return []
    rows = []
    for name, document in sorted(found.best_jobs.items()):
        figures = document["figures"]
        gap = figures["gap"]
        rows.append(
            [
                f"[{name}]({name}.md)",
                str(figures["trials"]),
                str(figures["common_jobs"]),
                shown.number(figures["fixed"]["reward"]),
                shown.signed(gap["flattered"]),
                _signed_ends(gap["cross_fitted"], gap["ci"]),
                str(document["commit"]),
            ]
        )
    columns = [
        "data",
        "jobs",
        "on all families",
        "best fixed job",
        "gap, flattered",
        "gap, cross-fitted",
        "commit",
    ]
    return [
        "## One fixed job, or a job for each family",
        "",
        "Mean reward of the best fixed job, and how much more the best job of each family earns; flattered: on the data by",
        "which jobs were chosen. What follows from it: [calibration](calibration/README.md).",
        "",
        *table(columns, rows),
    ]


def agents_section(found: Found) -> list[str]:
    """`nestling eval-agent --out`."""
    if found.agents is None:
        return []
    rows = [
        [
            label,
            str(row["n"]),
            _ends(row["reward_mean"], row["reward_ci"]),
            ""
            if row["gain_over_noop"] is None
            else _signed_ends(row["gain_over_noop"], row["gain_ci"]),
            "" if row["p_value"] is None else f"{row['p_value']:.2g}",
        ]
        for label, row in found.agents["arms"].items()
    ]
    return [
        "## Agents on the same tasks",
        "",
        "[What was played](agents/README.md), [figure](agents/figures/agents.svg).",
        "",
        *table(["agent", "n", "mean reward", "gain over no-op", "p"], rows),
    ]


def benchmarks_section(found: Found) -> list[str]:
    """Every file of `nestling bench`."""
    rows = [
        [
            f"[{name}](bench/{name}.json)",
            f"`{one['command']}`",
            str(one["date"])[:10],
            str(one["commit"]),
            ", ".join(
                f"{key} {value:.3g}"
                for key, value in one["ratios"].items()
                if isinstance(value, int | float) and "[" not in key
            ),
        ]
        for name, one in sorted(found.benchmarks.items())
    ]
    return [
        "## Benchmarks",
        "",
        *table(["file", "command", "date", "commit", "ratios"], rows),
    ]


def _average(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _signed_ends(value: float | None, ends: Sequence[float] | None) -> str:
    if value is None or ends is None:
        return shown.signed(value)
    return f"{shown.signed(value)} [{shown.signed(ends[0])}, {shown.signed(ends[1])}]"


def _ends(value: float | None, ends: Sequence[float] | None) -> str:
    if value is None:
        return ""
    if ends is None:
        return shown.number(value)
    return f"{shown.number(value)} [{shown.number(ends[0])}, {shown.number(ends[1])}]"
