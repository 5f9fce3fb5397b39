"""Write everything in the folder of results that follows from its data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from nestling.core.errors import StoreError
from nestling.core.rundir import write_atomic
from nestling.report.arc_data import is_arc_data
from nestling.report.compare import compare_runs
from nestling.report.figures import Drawing, draw_all
from nestling.report.figures.comparing import compare_all
from nestling.report.gather import gather
from nestling.report.listings import power_table, step_listing
from nestling.report.page import write_figures
from nestling.report.power import power_rows
from nestling.report.published.found import Found
from nestling.report.published.measurements import (
    agents_figure,
    job_response,
    read_json,
    read_steps,
    spread_figure,
    steps_figure,
)
from nestling.report.published.page import results_page
from nestling.report.published.plan import ArcPlan, read_plan
from nestling.report.published.sealed_section import SEALED_FILE
from nestling.report.run_data import RunData
from nestling.report.summary import summarise_run

__all__ = ["redraw"]


def redraw(folder: Path) -> Path:
    """Redraw every figure and table below `folder` and its `README.md`; returns that page.

    Runs are read from `arc/NAME/run`, measurements made apart from `arc/NAME/sweep`, each an export of
    a run on hidden set B; figures of C are in `arc/sealed-set-c.json`. Equal data gives equal bytes. Raises `ConfigError` without a plan in `arc/arcs.toml`, and
    `StoreError` for data that cannot be read or a folder that cannot be written.
    """
    arcs = folder / "arc"
    plan = read_plan(arcs / "arcs.toml")
    runs = {one.name: data for one in plan.arcs if (data := _kept(arcs / one.name / "run"))}
    sweeps = {one.name: data for one in plan.arcs if (data := _kept(arcs / one.name / "sweep"))}
    for name, data in runs.items():
        _write_run(arcs / name, data)
    for name, data in sweeps.items():
        _write_power(arcs / name / "sweep.power.csv", data)
    _compare(arcs, [one for one in plan.arcs if one.kind == "arc" and one.name in runs])
    first = next((one for one in plan.arcs if one.kind == "arc"), None)
    if first is not None and first.name in runs:
        summary = summarise_run(runs[first.name]).model_dump_json(indent=2) + "\n"
        _write(folder / "summary.json", summary)
    steps = {str(path.parent.relative_to(folder)): read_steps(path) for path in _step_files(folder)}
    for name, rows in steps.items():
        write_figures(folder / name, [steps_figure(rows, f"Reward and choices: {name}")], png=False)
    spread = _json(folder / "bench" / "spread.json")
    if spread is not None:
        _draw(folder / "bench", spread_figure(spread))
    agents = _json(folder / "agents" / "figures.json")
    if agents is not None:
        _draw(folder / "agents", agents_figure(agents))
    calibrated = _calibration(folder / "calibration")
    found = Found(
        plan=plan,
        arcs=runs,
        sweeps=sweeps,
        steps=steps,
        calibrated=calibrated,
        spread=spread,
        best_jobs={
            f"calibration/{path.stem}": document
            for path in sorted((folder / "calibration").glob("*.json"))
            if (document := read_json(path)).get("name") == "best-job"
        },
        benchmarks={
            path.stem: read_json(path) for path in sorted((folder / "bench").glob("*.json"))
        },
        agents=agents,
        sealed=_json(folder / SEALED_FILE),
        files=frozenset(one.file for one in plan.expected if (folder / one.file).exists()),
    )
    page = folder / "README.md"
    _write(page, results_page(found))
    return page


def _kept(folder: Path) -> RunData | None:
    if not is_arc_data(folder):
        return None
    data = gather(folder)
    if data.info.config.get("inner", {}).get("split") == "c":
        raise StoreError(
            f"{folder} was paid by the sealed hidden set C; expected a run on set B; keep the figures of "
            f"C as {SEALED_FILE} and remove the folder"
        )
    return data


def _write_run(folder: Path, data: RunData) -> None:
    write_figures(folder, draw_all(data), png=False)
    _write(folder / "steps.csv", step_listing(data).csv())
    _write(folder / "summary.json", summarise_run(data).model_dump_json(indent=2) + "\n")
    _write_power(folder / "power.csv", data)


def _write_power(path: Path, data: RunData) -> None:
    _write(path, power_table(power_rows(data)).csv())


def _compare(arcs: Path, plans: Sequence[ArcPlan]) -> None:
    """Seeds of the main experiment in one picture."""
    if len(plans) > 1:
        compared, differences = compare_runs([arcs / one.name / "run" for one in plans])
        write_figures(arcs, compare_all(compared, differences), png=False)


def _step_files(folder: Path) -> Iterator[Path]:
    """Steps of runs of which nothing else was kept."""
    for path in sorted(folder.glob("*/steps.csv")) + sorted(folder.glob("pilots/*/steps.csv")):
        if not (path.parent / "run").is_dir():
            yield path


def _calibration(folder: Path) -> dict[str, tuple[float, str]]:
    """Write the table of jobs of the first pilot; returns the best untrained score by family."""
    data = folder / "job-response.jsonl.gz"
    if not data.is_file():
        return {}
    response = job_response(data)
    _write(folder / "job-response.csv", response.csv())
    family, best = (response.columns.index(name) for name in ("family", "best_pre"))
    return {str(row[family]): (float(row[best] or 0), "calibration") for row in response.rows}


def _draw(folder: Path, figure: Drawing) -> None:
    write_figures(folder, [figure], png=False)


def _json(path: Path) -> dict[str, object] | None:
    return read_json(path) if path.is_file() else None


def _write(path: Path, text: str) -> None:
    write_atomic(path, text.encode("utf-8", "replace"))
