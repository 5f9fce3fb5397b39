"""What the agent chooses: base model, configuration keys, how different its jobs are."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.colors import LinearSegmentedColormap

from nestling.report.figures.drawing import (
    HEIGHT_IN,
    SERIES,
    Drawing,
    band,
    curve,
    drawing,
    legend,
    panels,
    steps_axis,
)
from nestling.report.figures.measures import step_numbers
from nestling.report.run_data import RunData
from nestling.report.table import Cell, Table, estimate_cells, estimate_columns

__all__ = ["base_models", "bases_by_family", "config_keys", "config_use", "exploration"]

_SHADES = LinearSegmentedColormap.from_list(
    "use", [(*_c, 1.0) for _c in ((0.94, 0.95, 0.97), (0.35, 0.62, 0.82), (0.0, 0.27, 0.47))]
)
"""Light to dark: from no job to every job."""


def base_models(data: RunData) -> Drawing:
    """Share of each base model, and of the better one where one is better."""
    steps = step_numbers(data)
    summaries = [row.report.summary for row in data.steps]
    names = sorted({name for one in summaries if one for name in one.base_model_share})
    shares = [
        [
            one.base_model_share.get(name, 0.0) if one and one.base_model_share else None
            for name in names
        ]
        for one in summaries
    ]
    with panels() as (canvas, [axes]):
        band(axes, steps, [row.better_base for row in data.steps], "the better base", SERIES[0])
        for line in axes.get_lines():
            # Wide and below the others: where one base is the better one throughout, they coincide.
            line.set(linewidth=5, alpha=0.45, marker="")
        for index, name in enumerate(names):
            values = [share[index] for share in shares]
            curve(axes, steps, values, name, SERIES[1 + index % (len(SERIES) - 1)])
        axes.set_ylabel("share of accepted jobs")
        axes.set_ylim(-0.03, 1.03)
        steps_axis(axes, steps)
        legend(axes)
        rows: list[tuple[Cell, ...]] = [
            (row.step, *share, *estimate_cells(row.better_base))
            for row, share in zip(data.steps, shares, strict=True)
        ]
        better = ", ".join(f"{family}: {base}" for family, base in sorted(data.better_base.items()))
        return drawing(
            canvas,
            "base_models",
            "Base model chosen",
            "Share of accepted jobs per base model"
            + (
                f", and share on the better base of their family ({better}) with a 95 % interval."
                if better
                else "; which base is better is not known yet."
            ),
            Table(columns=("step", *names, *estimate_columns("better_base")), rows=rows),
        )


def config_use(data: RunData) -> Drawing:
    """Use of the configuration surface overall."""
    steps = step_numbers(data)
    summaries = [row.report.summary for row in data.steps]
    use = [one.config_use if one else None for one in summaries]
    keys = [one.config_keys_mean if one else None for one in summaries]
    with panels(right_in=0.6) as (canvas, [axes]):
        curve(axes, steps, use, "jobs that set any key", SERIES[0])
        axes.set_ylabel("share of accepted jobs")
        axes.set_ylim(-0.03, 1.03)
        steps_axis(axes, steps)
        second = axes.twinx()
        second.grid(visible=False)
        second.spines["right"].set_visible(True)
        curve(second, steps, keys, "keys per job (right)", SERIES[1])
        second.set_ylabel("keys per accepted job")
        second.set_ylim(bottom=0)
        legend(axes, more=[second])
        rows: list[tuple[Cell, ...]] = [
            (row.step, a, b, row.num_valid) for row, a, b in zip(data.steps, use, keys, strict=True)
        ]
        return drawing(
            canvas,
            "config_use",
            "Use of the [prime_rl] table",
            "Share of accepted jobs whose job.toml sets at least one [prime_rl] key itself, and "
            "keys set per accepted job.",
            Table(columns=("step", "config_use", "keys_per_job", "n"), rows=rows),
        )


def bases_by_family(data: RunData) -> Drawing:
    """Which base the jobs of each family train, as a map."""
    names = sorted(
        {
            (family, base)
            for row in data.steps
            for family, shares in row.base_share_by_family.items()
            for base in shares
        },
        reverse=True,
    )
    shares = [
        [
            row.base_share_by_family[family].get(base, 0.0)
            if family in row.base_share_by_family
            else None
            for row in data.steps
        ]
        for family, base in names
    ]
    labels = [
        f"{family}: {base}{' *' if data.better_base.get(family) == base else ''}"
        for family, base in names
    ]
    return _map(
        data,
        labels,
        shares,
        name="bases_by_family",
        title="Base model chosen, by family",
        caption="Share of a family's accepted jobs per base model; white: no accepted job of that "
        "family in the step. *: the better base, untrained, of that family.",
    )


def config_keys(data: RunData) -> Drawing:
    """Use of each key as a map: keys down, steps across."""
    uses = [one.config_key_use if (one := row.report.summary) else {} for row in data.steps]
    totals: dict[str, float] = {}
    for use in uses:
        for key, share in use.items():
            totals[key] = totals.get(key, 0.0) + share
    names = sorted(totals, key=lambda key: (totals[key], key))
    return _map(
        data,
        names,
        [[use.get(name, 0.0) for use in uses] for name in names],
        name="config_keys",
        title="Which [prime_rl] keys the jobs set",
        caption="Share of accepted jobs that set the key, most used on top.",
    )


def _map(
    data: RunData,
    labels: Sequence[str],
    shares: Sequence[Sequence[float | None]],
    *,
    name: str,
    title: str,
    caption: str,
) -> Drawing:
    """Shares of accepted jobs by label, from the bottom, and step."""
    steps = step_numbers(data)
    edges = [step - 0.5 for step in steps] + [steps[-1] + 0.5]
    left_in = 0.3 + 0.08 * max(len(label) for label in labels)
    height_in = max(HEIGHT_IN, 0.9 + 0.2 * len(labels))
    with panels(height_in=height_in, left_in=left_in, top_in=0.12) as (canvas, [axes]):
        mesh = axes.pcolormesh(
            edges,
            [index - 0.5 for index in range(len(labels) + 1)],
            [[float("nan") if one is None else one for one in line] for line in shares],
            cmap=_SHADES,
            vmin=0.0,
            vmax=1.0,
            edgecolors="face",
            linewidth=0.2,
        )
        axes.grid(visible=False)
        axes.set_yticks(range(len(labels)), labels)
        steps_axis(axes, steps)
        axes.set_xlim(edges[0], edges[-1])
        # Drawn as cells, not as an image, so that the figure stays text.
        bar = canvas.colorbar(mesh, ax=axes, label="share of accepted jobs", ticks=[0, 0.5, 1])
        if bar.solids is not None:
            bar.solids.set(rasterized=False, edgecolor="face")
        rows: list[tuple[Cell, ...]] = [
            (row.step, *(line[index] for line in shares), row.num_valid)
            for index, row in enumerate(data.steps)
        ]
        table = Table(columns=("step", *labels, "n"), rows=rows)
        return drawing(canvas, name, title, caption, table)


def exploration(data: RunData) -> Drawing:
    """Best of a group beside its mean, and how many jobs differ."""
    steps = step_numbers(data)
    rewards = [one.reward if (one := row.report.summary) else None for row in data.steps]
    best = [row.best_of_group for row in data.steps]
    distinct = [row.distinct_in_group for row in data.steps]
    differing = [row.job_difference for row in data.steps]
    sizes = [row.group_size for row in data.steps if row.group_size is not None]
    size = f"{sum(sizes) / len(sizes):.3g}" if sizes else "k"
    with panels(1, 2) as (canvas, [left, right]):
        band(left, steps, rewards, "mean reward", SERIES[0])
        band(left, steps, best, f"best of {size}", SERIES[1])
        left.set_ylabel("reward")
        band(right, steps, distinct, "distinct", SERIES[2])
        band(right, steps, differing, "difference", SERIES[3])
        right.set_ylabel("share, within a group")
        right.set_ylim(-0.03, 1.03)
        for axes in (left, right):
            steps_axis(axes, steps)
            legend(axes)
        rows: list[tuple[Cell, ...]] = [
            (
                row.step,
                *estimate_cells(mean),
                *estimate_cells(row.best_of_group),
                row.group_size,
                *estimate_cells(row.distinct_in_group),
                *estimate_cells(row.job_difference),
                row.distinct_share,
                row.num_valid,
            )
            for row, mean in zip(data.steps, rewards, strict=True)
        ]
        return drawing(
            canvas,
            "exploration",
            "Best of a group, and diversity",
            "Left: mean reward, and mean over groups of the best reward in the group: what choosing "
            "the best of that many tries would give. Right, within groups of jobs for the same task: "
            "distinct jobs per accepted job, code included (1: no two alike), and difference, the "
            "share of choices (base, keys and their values) that differ between two of them. 95 % intervals "
            "over groups; none in a step with one group.",
            Table(
                columns=(
                    "step",
                    *estimate_columns("reward"),
                    *estimate_columns("best_of_group"),
                    "group_size",
                    *estimate_columns("distinct_in_group"),
                    *estimate_columns("job_difference"),
                    "distinct_share",
                    "accepted_jobs",
                ),
                rows=rows,
            ),
        )
