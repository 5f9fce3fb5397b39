"""The page of all results: the published experiment and ours side by side, with n and intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nestling.report import shown
from nestling.report.headline import held_out_scope, last_checkpoint
from nestling.report.paired import by_task, paired_gain
from nestling.report.power import power_rows
from nestling.report.published.markdown import NOT_MEASURED, NOT_RUN, gain, mean, table
from nestling.report.published.measurements import Step
from nestling.report.published.plan import ArcPlan, ResultsPlan
from nestling.report.reference_rows import ALL, is_checkpoint
from nestling.report.run_data import EpisodeRow, RunData
from nestling.report.windows import window_mean

__all__ = ["Found", "results_page"]

_UNTRAINED: Final = "untrained"
_NOOP: Final = "noop"
_NOT_REPORTED: Final = "not reported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Everything of the folder that the page shows; what is missing is said to be so."""

    plan: ResultsPlan
    arcs: Mapping[str, RunData]
    """Runs that have data, by the plan's name, and so on."""
    sweeps: Mapping[str, RunData]
    """Measurements made apart with `nestling eval-agent`."""
    steps: Mapping[str, Sequence[Step]]
    """Pilots and other runs of which only the steps were kept, by folder."""
    calibrated: Mapping[str, tuple[float, str]]
    """Best untrained score by family and where it was measured, from before the arcs."""
    spread: Mapping[str, Any] | None
    best_jobs: Mapping[str, Mapping[str, Any]]
    """Files of `nestling best-job`, by path without suffix; their tables are beside them."""
    benchmarks: Mapping[str, Mapping[str, Any]]
    """Files of `nestling bench`, by name."""
    agents: Mapping[str, Any] | None
    files: frozenset[str]
    """Of those that the plan expects, the ones that are there."""


def results_page(found: Found) -> str:
    """The page as Markdown."""
    parts = [
        _head(),
        _side_by_side(found),
        _bases(found),
        *(_arc(plan, found.arcs[plan.name]) for plan in found.plan.arcs if plan.name in found.arcs),
        *(
            _sweep(plan, found.sweeps[plan.name])
            for plan in found.plan.arcs
            if plan.name in found.sweeps
        ),
        _left_out(found),
        _pilots(found),
        _spread(found),
        _best_jobs(found),
        _agents(found),
        _benchmarks(found),
        _more(found),
        _open(found),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _head() -> list[str]:
    return [
        "# Results",
        "",
        "`make figures` writes this page, and every figure and table in this folder, from the data that",
        "is committed here. Intervals are 95 %. What has no data is said to be so; no number is written by hand",
        "but those of the published experiment, which are in [arc/arcs.toml](arc/arcs.toml).",
    ]


@dataclass(frozen=True, slots=True)
class _Quantity:
    """A line of the comparison."""

    key: str
    label: str
    ours: Callable[[RunData], str]


def _side_by_side(found: Found) -> list[str]:
    arcs = [plan for plan in found.plan.arcs if plan.kind == "arc"]
    rows = [
        [
            quantity.label,
            found.plan.published.figures.get(quantity.key, _NOT_REPORTED),
            *(
                quantity.ours(found.arcs[plan.name]) if plan.name in found.arcs else NOT_RUN
                for plan in arcs
            ),
        ]
        for quantity in _QUANTITIES
    ]
    columns = ["", "published", *(plan.title for plan in arcs)]
    return [
        "## The published arc and ours",
        "",
        found.plan.published.about,
        "",
        *table(columns, rows),
        "",
        "First and last: training episodes that the untrained weights played, and those of the last steps, as many as",
        "it takes to see every family. Measured: sweeps, where all policies meet the same tasks and seeds; gains are",
        "paired differences with a sign-flip p-value. Held out: never in the RL mix; the embedded agent's supervised warm",
        "start showed it demonstrations on every family. The size of a run is in its row: smaller ones are not the main arc.",
    ]


def _config(data: RunData) -> str:
    steps = data.info.planned_steps
    jobs = [row.report.episodes for row in data.steps]
    size = f"{max(jobs)}" if jobs else "?"
    return f"{len(data.steps)}{'' if steps in (None, len(data.steps)) else f' of {steps}'} × {size}"


def _agent(data: RunData) -> str:
    agent = data.info.config.get("agent")
    return str(agent.get("model", "?")) if isinstance(agent, dict) else "?"


def _first_last(value: Callable[[EpisodeRow], float | None], name: str) -> Callable[[RunData], str]:
    def ours(data: RunData) -> str:
        first = window_mean(data, "untrained", value, name)
        last = window_mean(data, "final", value, name)
        return f"{mean(first)} → {mean(last)}"

    return ours


def _better_base(data: RunData) -> str:
    def value(one: EpisodeRow) -> float | None:
        if one.base_model is None or one.family not in data.better_base:
            return None
        return float(one.base_model == data.better_base[one.family])

    return _first_last(value, "better-base")(data)


def _no_op(data: RunData) -> str:
    line = data.headline.no_op
    return NOT_MEASURED if line is None else f"{shown.number(line)} ({data.headline.no_op_source})"


def _over_no_op(data: RunData) -> str:
    return _over(data, data.training_families, lambda one: one.reward)


def _paired_over_no_op(data: RunData) -> str:
    return _over(data, data.headline.held_out_families, lambda one: one.paired_reward)


def _over(data: RunData, families: Sequence[str], value: Callable[[EpisodeRow], float]) -> str:
    """The newest checkpoint that was measured on these families, minus the no-op."""
    arms = {
        one.arm
        for one in data.episodes
        if one.arm is not None and is_checkpoint(one.arm) and one.family in families
    }
    if not arms:
        return NOT_MEASURED
    trained, no_op = (by_task(data.episodes, arm, families) for arm in (max(arms), _NOOP))
    return gain(paired_gain(trained, no_op, value))


def _reference(arm: str) -> Callable[[RunData], str]:
    def ours(data: RunData) -> str:
        rows = [row for row in data.references if (row.arm, row.family) == (arm, ALL)]
        return mean(rows[0].reward) if rows else NOT_MEASURED

    return ours


def _held_out(step: str) -> Callable[[RunData], str]:
    def ours(data: RunData) -> str:
        head = data.headline
        return mean({"untrained": head.held_out_untrained, "final": head.held_out}[step])

    return ours


def _held_out_best(data: RunData) -> str:
    """The highest of the checkpoints, which flatters."""
    best = None
    for step, sweep in sorted(data.sweeps.items()):
        arm, scope = last_checkpoint(sweep), held_out_scope(sweep, data.training_families)
        if arm is None or scope is None:
            continue
        summary = sweep.result(arm, scope).summary
        if summary is not None and (best is None or summary.reward.mean > best[1].mean):
            best = (step, summary.reward)
    return NOT_MEASURED if best is None else f"{mean(best[1])} (step {best[0]})"


def _job_price(data: RunData) -> str:
    jobs = [one for one in data.jobs if one.state not in ("queued", "running")]
    if data.usd is None or not jobs:
        return NOT_MEASURED
    return shown.usd(data.usd / len(jobs))


_QUANTITIES: Final = (
    _Quantity("agent", "agent", _agent),
    _Quantity("size", "outer steps × episodes", _config),
    _Quantity(
        "jobs",
        "jobs that ran",
        lambda data: str(sum(one.state not in ("queued", "running") for one in data.jobs)),
    ),
    _Quantity("usd", "cost", lambda data: shown.usd(data.usd)),
    _Quantity("usd_per_job", "cost per job", _job_price),
    _Quantity(
        "gpu_minutes",
        "GPU minutes (accounted)",
        lambda data: shown.number(data.gpu_minutes, 1),
    ),
    _Quantity("reward_first", "reward, first", lambda data: mean(data.headline.untrained)),
    _Quantity(
        "reward_best", "reward, best window (flatters)", lambda data: mean(data.headline.best)
    ),
    _Quantity("reward_last", "reward, last", lambda data: mean(data.headline.final)),
    _Quantity(
        "reward_measured",
        "reward, trained, measured on the training families",
        lambda data: mean(data.headline.measured),
    ),
    _Quantity("no_op", "no-op line", _no_op),
    _Quantity("random", "random valid job", _reference("random")),
    _Quantity("template", "human template", _reference("template")),
    _Quantity("over_no_op", "trained minus no-op, measured", _over_no_op),
    _Quantity(
        "validation", "validation term, first → last", _first_last(lambda one: one.validation, "v")
    ),
    _Quantity(
        "success",
        "valid jobs that end scored, first → last",
        _first_last(lambda one: float(one.is_job_done) if one.is_valid else None, "success"),
    ),
    _Quantity(
        "quality",
        "quality of scored jobs, first → last",
        _first_last(lambda one: one.quality if one.is_job_done else None, "quality"),
    ),
    _Quantity("post", "hidden score, first → last", _first_last(lambda one: one.post, "post")),
    _Quantity(
        "uplift",
        "uplift over the best untrained base, first → last",
        _first_last(lambda one: one.uplift, "uplift"),
    ),
    _Quantity("better_base", "better base chosen, first → last", _better_base),
    _Quantity(
        "config_use",
        "a `[prime_rl]` key set, first → last",
        _first_last(
            lambda one: float(bool(one.config_keys)) if one.config_keys is not None else None,
            "config-use",
        ),
    ),
    _Quantity("held_out_untrained", "held out, untrained", _held_out("untrained")),
    _Quantity("held_out_best", "held out, best checkpoint (flatters)", _held_out_best),
    _Quantity("held_out_last", "held out, last checkpoint", _held_out("final")),
    _Quantity(
        "held_out_gain",
        "held out, last minus untrained",
        lambda data: gain(data.headline.held_out_gain),
    ),
    _Quantity(
        "held_out_paired",
        "held out, last minus no-op, by the `paired` reward",
        _paired_over_no_op,
    ),
)


def _bases(found: Found) -> list[str]:
    """Untrained scores: ours as an arc measured them, else the spread of jobs, else the first pilot."""
    ours = dict(found.calibrated)
    if found.spread is not None:
        ours |= {run["family"]: (run["best_pre"], "spread") for run in found.spread["runs"]}
    for name, data in found.arcs.items():
        ours |= {family: (score, name) for family, score in data.best_pre.items()}
    names = list(dict.fromkeys([*found.plan.published.best_pre, *ours]))
    rows = [
        [
            name,
            shown.number(found.plan.published.best_pre.get(name)),
            *((shown.number(ours[name][0]), ours[name][1]) if name in ours else (NOT_MEASURED, "")),
        ]
        for name in names
    ]
    return [
        "## Untrained bases",
        "",
        "Best untrained score by family. The families have the same names and ideas; tasks and models are others.",
        "",
        *table(["family", "published, 200 items", "ours", "measured in"], rows),
    ]


def _arc(plan: ArcPlan, data: RunData) -> list[str]:
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
    account = data.headline.account
    if account is not None:
        rows = [[name.replace("_", " "), shown.estimate(one)] for name, one in account.parts()]
        lines += [
            "",
            "Where the last reward differs from the first:",
            "",
            *table(["part", "difference"], rows),
        ]
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


def _sweep(plan: ArcPlan, data: RunData) -> list[str]:
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


def _left_out(found: Found) -> list[str]:
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


def _pilots(found: Found) -> list[str]:
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


def _spread(found: Found) -> list[str]:
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


def _best_jobs(found: Found) -> list[str]:
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


def _agents(found: Found) -> list[str]:
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


def _benchmarks(found: Found) -> list[str]:
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


def _more(found: Found) -> list[str]:
    lines = [
        f"- [{one.what}]({one.file})" for one in found.plan.expected if one.file in found.files
    ]
    return ["## More", "", *lines] if lines else []


def _open(found: Found) -> list[str]:
    missing = [
        f"- {plan.title}: `nestling run {plan.recipe}`"
        for plan in found.plan.arcs
        if plan.name not in found.arcs
    ]
    missing += [
        f"- {one.what}: `{one.file}`" for one in found.plan.expected if one.file not in found.files
    ]
    if not missing:
        return []
    return ["## Not yet run", "", *missing]


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
