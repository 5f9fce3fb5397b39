"""Finished episodes of a run as rows of numbers; their text stays in the store."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from dataclasses import replace

from pydantic import ValidationError

from nestling.agent.episode_result import EpisodeResult
from nestling.core.errors import StoreError
from nestling.report.run_data import EpisodeRow
from nestling.store import RunStore
from nestling.store.episodes import EpisodeRecord
from nestling.store.progress import GroupRecord

__all__ = ["arm_of", "episode_rows", "read_result"]

_MEASURE = "measure"


def episode_rows(
    store: RunStore, known: MutableMapping[str, tuple[EpisodeRow, ...]] | None = None
) -> tuple[EpisodeRow, ...]:
    """Every finished episode, group by group; only one group's text is held at a time.

    `known`: rows by group of an earlier call; groups that were complete are not read again. It is
    updated.
    """
    memory = {} if known is None else known
    rows: list[EpisodeRow] = []
    for group in store.progress.groups():
        found = memory.get(group.id, ())
        if len(found) < group.size:
            finished = store.episodes.all(group_id=group.id, state="finished")
            found = tuple(_row(group, one, read_result(store, one)) for one in finished)
        step = _step_of(group)
        memory[group.id] = tuple(
            one if one.step == step else replace(one, step=step) for one in found
        )
        rows += memory[group.id]
    return tuple(rows)


def read_result(store: RunStore, record: EpisodeRecord) -> EpisodeResult:
    """The full result of a finished episode, without its tokens; raises `StoreError`."""
    try:
        return EpisodeResult.model_validate(record.summary["result"])
    except (KeyError, TypeError, ValidationError) as error:
        raise StoreError(
            f"{store.path}: episode {record.id} has no readable result: {error}; "
            f"use the version that wrote it or restore a backup"
        ) from error


def arm_of(group: GroupRecord) -> str | None:
    """Name of the measured policy; None for a training group."""
    if group.purpose != _MEASURE:
        return None
    return group.id.removeprefix(f"{_MEASURE}/").rpartition("/")[0]


def _step_of(group: GroupRecord) -> int | None:
    return group.used_in_step if group.purpose == "train" else group.step


def _row(group: GroupRecord, record: EpisodeRecord, result: EpisodeResult) -> EpisodeRow:
    terms = result.terms[result.reward_kind]
    accepted = result.manifest if result.valid_attempt is not None else None
    outcome = result.outcome
    scored = outcome if outcome is not None and result.outcome_code == "job_succeeded" else None
    is_train = group.purpose == "train"
    settings = None
    if accepted is not None:
        choices = [accepted.base_model, accepted.prime_rl, accepted.env_keys]
        settings = json.dumps(choices, sort_keys=True)
    return EpisodeRow(
        id=record.id,
        group_id=group.id,
        member=record.idx,
        purpose="train" if is_train else "measure",
        arm=arm_of(group),
        step=_step_of(group),
        version=record.summary.get("version", record.learner_version),
        family=result.family,
        outcome_code=result.outcome_code,
        detail=result.detail,
        reward_kind=result.reward_kind,
        reward=result.reward,
        validation=terms.validation,
        quality=terms.quality,
        speed=terms.speed,
        seed_reward=result.terms["seed"].total,
        paired_reward=result.terms["paired"].total,
        num_attempts=len(result.attempts),
        valid_attempt=result.valid_attempt,
        base_model=accepted.base_model if accepted else None,
        settings=settings,
        config_keys=tuple(sorted(accepted.prime_rl)) if accepted else None,
        job_hash=_accepted_hash(result),
        pre=outcome.pre if outcome else None,
        best_pre=outcome.best_pre if outcome else None,
        post=scored.post if scored else None,
        uplift=scored.uplift if scored else None,
        uplift_ci=scored.uplift_ci if scored else None,
        num_items=scored.n if scored else 0,
        train_steps=outcome.train_steps if outcome else 0,
        job_cpu_s=outcome.cpu_s if outcome else 0.0,
        job_wall_s=outcome.wall_s if outcome else 0.0,
        job_usd=outcome.usd if outcome else 0.0,
        sampled_tokens=result.sampled_tokens,
        seconds=result.seconds,
    )


def _accepted_hash(result: EpisodeResult) -> str | None:
    for attempt in result.attempts:
        if attempt.number == result.valid_attempt:
            return attempt.job_hash
    return result.outcome.job_hash if result.outcome else None
