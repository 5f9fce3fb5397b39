"""Figures and tables of what was measured beside the arcs: pilots, spread of jobs, agents, benchmarks."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nestling.core.errors import StoreError
from nestling.outer.stats import Estimate
from nestling.report.figures.drawing import (
    BLUE,
    GREY,
    SERIES,
    Drawing,
    Series,
    band,
    curve,
    drawing,
    intervals,
    label_room_in,
    legend,
    panels,
    steps_axis,
)
from nestling.report.table import Table, estimate_cells, estimate_columns

__all__ = [
    "agents_figure",
    "job_response",
    "read_json",
    "read_steps",
    "spread_figure",
    "steps_figure",
]

Step = Mapping[str, float | None]
"""One row of `steps.csv`; None for an empty cell."""


def read_json(path: Path) -> dict[str, Any]:
    """One object; raises `StoreError` when it cannot be read."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(found, dict):
        raise _unreadable(path, "it holds no object")
    return found


def read_steps(path: Path) -> list[Step]:
    """The numbers of a `steps.csv`, of this version or an older one; raises `StoreError`."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [
                {
                    name: {"yes": 1.0, "no": 0.0}.get(cell)
                    if cell in ("yes", "no")
                    else _number(cell)
                    for name, cell in row.items()
                }
                for row in csv.DictReader(file)
            ]
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def steps_figure(steps: Sequence[Step], title: str) -> Drawing:
    """Reward with the no-op line, and what the agent chose, from the numbers of `steps.csv`."""
    numbers = [int(row["step"] or 0) for row in steps]
    reward = [_estimate(row, "reward") for row in steps]
    formula = [row.get("no_op_formula") for row in steps]
    shares = {
        "valid": [_mean(row, "validity") for row in steps],
        "better base": [_mean(row, "better_base") for row in steps],
        "sets keys": [row.get("config_use") for row in steps],
    }
    with panels(1, 2) as (canvas, [left, right]):
        band(left, numbers, reward, "agent", SERIES[0])
        curve(left, numbers, formula, "no-op (formula)", Series(GREY, "--", ""))
        left.set_ylabel("reward")
        for look, (name, values) in zip(SERIES[1:], shares.items(), strict=False):
            curve(right, numbers, values, name, look)
        right.set_ylabel("share")
        right.set_ylim(-0.03, 1.03)
        for axes in (left, right):
            steps_axis(axes, numbers)
            legend(axes)
        rows = [
            (number, *estimate_cells(one), line, *(values[index] for values in shares.values()))
            for index, (number, one, line) in enumerate(zip(numbers, reward, formula, strict=True))
        ]
        columns = ("step", *estimate_columns("reward"), "no_op_formula", *shares)
        return drawing(
            canvas,
            "reward",
            title,
            "Left: mean reward with 95 % intervals over groups, and what a job earns by the formula "
            "that is valid at once and changes nothing. Right: episodes with an accepted job; "
            "accepted jobs on the better base, and those that set a [prime_rl] key.",
            Table(columns=columns, rows=rows),
        )


def spread_figure(document: Mapping[str, Any]) -> Drawing:
    """Uplift of each reference job on each family."""
    runs = document["runs"]
    num_seeds = len(document["settings"]["seeds"])
    rows = [(f"{run['job']}, {run['family']}", _of_run(run)) for run in _by_job(runs)]
    left_in = label_room_in([label for label, _ in rows])
    height = 0.9 + 0.22 * len(rows)
    with panels(height_in=height, left_in=left_in, top_in=0.12) as (canvas, [axes]):
        intervals(axes, [(label, one, BLUE) for label, one in rows])
        axes.set_xlabel("post − best_pre")
        table = Table(
            columns=("job", *estimate_columns("uplift")),
            rows=[(label, *estimate_cells(one)) for label, one in rows],
        )
        return drawing(
            canvas,
            "spread",
            "What good and bad jobs earn",
            f"Uplift over the best untrained base, mean over {num_seeds} training seeds of "
            f"{document['settings']['items']} hidden items, with a 95 % t interval over seeds.",
            table,
        )


def agents_figure(document: Mapping[str, Any]) -> Drawing:
    """Mean reward of each agent of `nestling eval-agent --out`."""
    rows = [
        (label, _interval(row["reward_mean"], row["reward_ci"], row["n"]))
        for label, row in document["arms"].items()
        if row["reward_mean"] is not None
    ]
    labels = [label if len(label) <= 40 else f"…{label[-39:]}" for label, _ in rows]
    left_in = label_room_in(labels)
    with panels(height_in=0.9 + 0.3 * len(rows), left_in=left_in, top_in=0.12) as (canvas, [axes]):
        marks = zip(labels, rows, strict=True)
        intervals(axes, [(label, one, BLUE) for label, (_, one) in marks], zero=False)
        axes.set_xlabel("mean reward")
        table = Table(
            columns=("agent", *estimate_columns("reward")),
            rows=[(label, *estimate_cells(one)) for label, one in rows],
        )
        return drawing(
            canvas,
            "agents",
            "Agents on the same tasks",
            "Mean reward with 95 % bootstrap intervals.",
            table,
        )


def job_response(path: Path) -> Table:
    """Trained score by family and choices, from the jobs of the first pilot; raises `StoreError`."""
    try:
        lines = gzip.decompress(path.read_bytes()).splitlines()
        jobs = [json.loads(line) for line in lines]
    except (OSError, EOFError, ValueError) as error:
        raise _unreadable(path, error) from error
    cells: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in jobs:
        span = "" if one["span"] is None else "..".join(str(end) for end in one["span"])
        settings = json.dumps(one["set"], sort_keys=True)
        cells.setdefault((one["fam"], one["base"], one["rub"], span, settings), []).append(one)
    return Table(
        columns=(
            *("family", "base_model", "rubric", "range", "settings", "jobs", "best_pre"),
            *("post_mean", "post_min", "post_max"),
        ),
        rows=[
            (*key, len(found), found[0]["best"], sum(posts) / len(posts), min(posts), max(posts))
            for key, found in sorted(cells.items())
            if (posts := [one["post"] for one in found if one["post"] is not None])
        ],
    )


def _by_job(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Jobs in the order they are named, each with its families together."""
    order = list(dict.fromkeys(run["job"] for run in runs))
    known = [run for run in runs if run["uplift_mean"] is not None]
    return sorted(known, key=lambda run: order.index(run["job"]))


def _of_run(run: Mapping[str, Any]) -> Estimate:
    return _interval(run["uplift_mean"], run["uplift_ci"], len(run["uplifts"]))


def _interval(mean: float, ends: Sequence[float] | None, n: int) -> Estimate:
    low, high = ends if ends is not None else (None, None)
    return Estimate(mean=mean, lo=low, hi=high, n=n)


def _estimate(row: Step, name: str) -> Estimate | None:
    mean = row.get(f"{name}_mean")
    if mean is None:
        return None
    return Estimate(
        mean=mean, lo=row.get(f"{name}_lo"), hi=row.get(f"{name}_hi"), n=int(row[f"{name}_n"] or 0)
    )


def _mean(row: Step, name: str) -> float | None:
    return row.get(f"{name}_mean")


def _number(cell: str) -> float | None:
    return float(cell) if cell else None


def _unreadable(path: Path, error: object) -> StoreError:
    return StoreError(f"cannot read {path}: {error}; expected committed results; restore the file")
