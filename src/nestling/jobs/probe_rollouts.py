"""A few real rollouts with the base model a job chose; the only part of the probe that needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nestling.core.errors import Problem
from nestling.core.seeds import derive_seed
from nestling.engine.model import Model
from nestling.engine.sampler import SamplingParams
from nestling.jobs.budget import Workload
from nestling.jobs.manifest import JobManifest
from nestling.jobs.opening import opening_ids
from nestling.jobs.rollout_env import RolloutEnv, Row
from nestling.jobs.rollouts import play_env

__all__ = ["Measured", "measure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the rollouts showed."""

    workload: Workload | None
    """None when nothing could be played."""
    problems: list[Problem]


def measure(
    model: Model,
    env: RolloutEnv,
    rows: Sequence[Row],
    manifest: JobManifest,
    *,
    seed: int,
    eval_items: int,
) -> Measured:
    """Play each row once under the job's own sampling settings.

    Raises:
        JailError: from the environment.
    """
    table = manifest.prime_rl
    params = SamplingParams(
        temperature=table.temperature,
        max_turn_tokens=table.max_tokens,
        max_total_tokens=table.seq_len,
        max_turns=table.max_turns,
    )
    schemas = None if model.tokenizer.is_closed else env.tool_schemas()
    longest = max(
        len(opening_ids(model.tokenizer, row.system_prompt, row.prompt, schemas)) for row in rows
    )
    limit = min(table.seq_len, model.config.max_positions)
    if longest + table.max_tokens > limit:
        return Measured(workload=None, problems=[_too_long(longest, table.max_tokens, limit)])
    seeds = [derive_seed(seed, "probe", row.index) for row in rows]
    played = play_env(model, env, [row.index for row in rows], seeds, params)
    count = len(played)
    workload = Workload(
        tokens_per_rollout=sum(len(one.rollout.ids) for one in played) / count,
        sampled_tokens_per_rollout=sum(sum(one.rollout.sampled) for one in played) / count,
        turns_per_rollout=sum(one.rollout.num_turns for one in played) / count,
        params=int(model.weights.flat.shape[-1]),
        eval_items=eval_items,
    )
    failed = next((one.score.error for one in played if one.score.error is not None), None)
    return Measured(workload=workload, problems=[] if failed is None else [_failed(failed)])


def _too_long(longest: int, max_tokens: int, limit: int) -> Problem:
    return Problem(
        stage="rollout",
        code="rollout.seq_len",
        wrong=f"a prompt has {longest} tokens; with max_tokens {max_tokens} that is over {limit}",
        expected="room for a turn within seq_len",
        fix="raise seq_len or shorten prompts",
    )


def _failed(error: str) -> Problem:
    return Problem(
        stage="rollout",
        code="rollout.error",
        wrong=f"scoring a model's rollout failed: {error[:60]}",
        expected="a number for any text",
        fix="handle odd replies in the reward",
    )
