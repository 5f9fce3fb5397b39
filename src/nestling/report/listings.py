"""The long lists of a report as tables: steps, episodes, jobs."""

from __future__ import annotations

from collections.abc import Sequence

from nestling.report.power import PowerRow
from nestling.report.run_data import RunData, StepRow
from nestling.report.table import Cell, Table, estimate_cells, estimate_columns

__all__ = ["episode_table", "job_table", "power_table", "step_listing"]


def step_listing(data: RunData) -> Table:
    """Everything about each step, one row a step."""
    rows: list[tuple[Cell, ...]] = []
    for row in data.steps:
        summary = row.report.summary
        rows.append(
            (
                row.step,
                row.report.version,
                row.report.skipped,
                row.report.episodes,
                row.report.dead_episodes,
                row.num_groups,
                *estimate_cells(summary.reward if summary else None),
                *estimate_cells(row.validation),
                *estimate_cells(row.quality),
                *estimate_cells(row.speed),
                *estimate_cells(row.first_try),
                *estimate_cells(row.validity),
                *estimate_cells(row.job_success),
                *estimate_cells(summary.uplift if summary else None),
                *estimate_cells(row.post),
                *estimate_cells(row.best_pre),
                *estimate_cells(row.better_base),
                summary.config_use if summary else None,
                *estimate_cells(row.scored_quality),
                *estimate_cells(row.best_of_group),
                *estimate_cells(row.distinct_in_group),
                *estimate_cells(row.job_difference),
                *_parts(row),
                row.attempts,
                row.distinct_share,
                row.no_op_formula,
                row.report.agent_tokens,
                row.report.step_s,
            )
        )
    names = (
        *("reward", "validation", "quality", "speed", "first_try", "validity", "job_success"),
        *("uplift", "post", "best_pre", "better_base"),
    )
    later = ("scored_quality", "best_of_group", "distinct_in_group", "job_difference")
    estimates = [column for name in names for column in estimate_columns(name)]
    return Table(
        columns=(
            *("step", "version", "skipped", "episodes", "dead_episodes", "groups"),
            *estimates,
            "config_use",
            *(column for name in later for column in estimate_columns(name)),
            *("paid_validation", "paid_quality", "paid_speed", "paid_no_submission"),
            *("attempts", "distinct_share", "no_op_formula", "agent_tokens", "step_s"),
        ),
        rows=rows,
    )


def episode_table(data: RunData) -> Table:
    """Every finished episode."""
    columns = (
        *("episode", "purpose", "arm", "step", "version", "family", "outcome", "reason"),
        *("reward", "validation", "quality", "speed", "seed_reward", "paired_reward"),
        *("attempts", "valid_attempt", "base_model"),
        *("settings", "pre", "best_pre", "post", "uplift", "uplift_lo", "uplift_hi", "items"),
        *("job_hash", "sampled_tokens", "seconds"),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            *(one.id, one.purpose, one.arm, one.step, one.version, one.family, one.outcome_code),
            *(one.detail, one.reward, one.validation, one.quality, one.speed),
            *(one.seed_reward, one.paired_reward, one.num_attempts),
            *(one.valid_attempt, one.base_model, one.settings, one.pre, one.best_pre, one.post),
            *(one.uplift, *(one.uplift_ci or (None, None)), one.num_items, one.job_hash),
            *(one.sampled_tokens, one.seconds),
        )
        for one in data.episodes
    ]
    return Table(columns=columns, rows=rows)


def job_table(data: RunData) -> Table:
    """Every job; which keys it sets is known of those that an episode waited for."""
    keys = {
        (one.job_hash, one.family): " ".join(one.config_keys)
        for one in data.episodes
        if one.config_keys is not None
    }
    columns = (
        *("job", "family", "state", "base_model", "config_keys", "reason", "pre", "best_pre"),
        *("post", "uplift", "uplift_lo", "uplift_hi", "items", "train_steps", "cpu_s", "wall_s"),
        *("usd", "worker", "tries"),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            *(one.id, one.family, one.state, one.base_model),
            *(keys.get((one.job_hash, one.family)), one.reason, one.pre, one.best_pre),
            *(one.post, one.uplift, *(one.uplift_ci or (None, None)), one.num_items),
            *(one.train_steps, one.cpu_s, one.wall_s, one.usd, one.worker, one.tries),
        )
        for one in data.jobs
    ]
    return Table(columns=columns, rows=rows)


def power_table(found: Sequence[PowerRow]) -> Table:
    """One row for each comparison and number of hidden items."""
    columns = (
        *("arm", "against", "families", *estimate_columns("difference"), "p_value", "family_sd"),
        *("task_sd", "episode_sd", "item_sd", "items", "effect", "detectable", "pairs_needed"),
        *("with_items", "item_floor", "pairs_needed_with_items"),
    )
    rows: list[tuple[Cell, ...]] = []
    for one in found:
        cells: tuple[Cell, ...] = (
            *(one.arm, one.against, " ".join(one.families), *estimate_cells(one.difference)),
            *(one.difference.p_value, one.family_sd, one.task_sd, one.episode_sd, one.item_sd),
            *(one.items, one.effect, one.detectable, one.pairs),
        )
        rows += [(*cells, need.items, need.floor, need.pairs) for need in one.by_items]
        if not one.by_items:
            rows.append((*cells, None, None, None))
    return Table(columns=columns, rows=rows)


def _parts(row: StepRow) -> tuple[Cell, ...]:
    """Weighted parts of the mean reward."""
    parts = row.parts
    if parts is None:
        return (None, None, None, None)
    return (parts.validation, parts.quality, parts.speed, parts.no_submission)
