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
from nestling.jobs.rollout_env import RolloutEnv
from nestling.jobs.rollouts import EnvRollout, play_env

__all__ = ["Measured", "measure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the rollouts showed."""

    workload: Workload
    problems: list[Problem]


def measure(
    model: Model,
    env: RolloutEnv,
    rows: Sequence[int],
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
    seeds = [derive_seed(seed, "probe", row) for row in rows]
    played = play_env(model, env, rows, seeds, params)
    count = len(played)
    workload = Workload(
        tokens_per_rollout=sum(len(one.rollout.ids) for one in played) / count,
        sampled_tokens_per_rollout=sum(sum(one.rollout.sampled) for one in played) / count,
        turns_per_rollout=sum(one.rollout.num_turns for one in played) / count,
        params=int(model.weights.flat.shape[-1]),
        eval_items=eval_items,
    )
    return Measured(workload=workload, problems=_problems(played, manifest))


def _problems(played: Sequence[EnvRollout], manifest: JobManifest) -> list[Problem]:
    table = manifest.prime_rl
    longest = max(one.rollout.prompt_len for one in played)
    if longest + table.max_tokens > table.seq_len:
        return [
            Problem(
                stage="rollout",
                code="rollout.seq_len",
                wrong=f"a prompt has {longest} tokens, seq_len is {table.seq_len}",
                expected=f"room for {table.max_tokens} more (max_tokens)",
                fix="raise seq_len or shorten prompts",
            )
        ]
    failed = next((one.score.error for one in played if one.score.error is not None), None)
    if failed is not None:
        return [
            Problem(
                stage="rollout",
                code="rollout.error",
                wrong=f"scoring a model's rollout failed: {failed[:60]}",
                expected="a number for any text",
                fix="handle odd replies in the reward",
            )
        ]
    return []
