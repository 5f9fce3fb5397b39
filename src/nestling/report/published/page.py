"""The page of all results: the published experiment and ours side by side, with n and intervals."""

from __future__ import annotations

from typing import Final

from nestling.report import shown
from nestling.report.published.arc_sections import arc_section, left_out_section, sweep_section
from nestling.report.published.found import Found
from nestling.report.published.markdown import NOT_MEASURED, NOT_RUN, table
from nestling.report.published.measured_sections import (
    agents_section,
    benchmarks_section,
    best_jobs_section,
    pilots_section,
    spread_section,
)
from nestling.report.published.quantities import QUANTITIES, Evidence
from nestling.report.published.sealed_section import sealed_section

__all__ = ["results_page"]

_NOT_REPORTED: Final = "not reported"


def results_page(found: Found) -> str:
    """The page as Markdown."""
    parts = [
        _head(),
        _side_by_side(found),
        _bases(found),
        *(
            arc_section(plan, found.arcs[plan.name])
            for plan in found.plan.arcs
            if plan.name in found.arcs
        ),
        *(
            sweep_section(plan, found.sweeps[plan.name])
            for plan in found.plan.arcs
            if plan.name in found.sweeps
        ),
        sealed_section(found),
        left_out_section(found),
        pilots_section(found),
        spread_section(found),
        best_jobs_section(found),
        agents_section(found),
        benchmarks_section(found),
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


def _side_by_side(found: Found) -> list[str]:
    arcs = [plan for plan in found.plan.arcs if plan.kind == "arc"]
    rows = [
        [
            quantity.label,
            found.plan.published.figures.get(quantity.key, _NOT_REPORTED),
            *(
                quantity.ours(Evidence.of(found.arcs[plan.name], found.sweeps.get(plan.name)))
                if plan.name in found.arcs
                else NOT_RUN
                for plan in arcs
            ),
        ]
        for quantity in QUANTITIES
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
        "paired differences with a sign-flip p-value. Held out: never in the RL mix, and triage not in the embedded agent's",
        "supervised warm start either. The size of a run is in its row: smaller ones are not the main arc. micro and hatchling",
        "were built again on 2026-12-01 ([why](calibration/README.md)); what was measured before used the ones before.",
    ]


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
