"""What a small job is expected to cost, before it runs.

Seconds per token follow a straight line in the number of parameters, fitted to one core of a
laptop-class processor (float32, one thread): 1.58 M parameters sample 3,500 and train 5,000
tokens a second, 0.35 M parameters 10,500 and 18,000.
"""

from __future__ import annotations

from dataclasses import dataclass

from nestling.core.errors import Problem
from nestling.jobs.manifest import JobManifest
from nestling.jobs.probe_report import Predicted

__all__ = ["Caps", "CoreSpeed", "Workload", "budget_problems", "predict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSpeed:
    """Processor seconds; replace by what `nestling bench` measures on a machine."""

    sample_s_per_token: float = 41e-6
    sample_s_per_token_and_million: float = 155e-6
    train_s_per_token: float = 15e-6
    train_s_per_token_and_million: float = 117e-6
    env_s_per_turn: float = 2.3e-3
    """Tool call or scoring of one turn in the env worker."""
    start_s: float = 6.0
    """Starting and importing the env worker, loading and saving the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one rollout of the job looks like, and how much is scored around it."""

    tokens_per_rollout: float
    """Prompt, turns and tool replies."""
    sampled_tokens_per_rollout: float
    turns_per_rollout: float
    params: int
    """Trained numbers of the base model."""
    eval_items: int = 200
    """Hidden items of the post-score; the pre-score is shared between jobs and costs nothing here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """What one job may cost."""

    cpu_s: float = 600.0
    usd: float | None = None
    """None: money is not limited here."""
    usd_per_cpu_hour: float = 0.0


def predict(
    manifest: JobManifest,
    workload: Workload,
    *,
    usd_per_cpu_hour: float = 0.0,
    speed: CoreSpeed | None = None,
) -> Predicted:
    """Processor seconds and dollars of training and post-score."""
    core = speed or CoreSpeed()
    million = workload.params / 1e6
    sample = core.sample_s_per_token + core.sample_s_per_token_and_million * million
    train = core.train_s_per_token + core.train_s_per_token_and_million * million
    rollout_s = (
        workload.sampled_tokens_per_rollout * sample
        + workload.turns_per_rollout * core.env_s_per_turn
    )
    rollouts = manifest.prime_rl.max_steps * manifest.prime_rl.batch_size
    cpu_s = (
        core.start_s
        + rollouts * (rollout_s + workload.tokens_per_rollout * train)
        + workload.eval_items * rollout_s
    )
    return Predicted(cpu_s=round(cpu_s, 2), usd=round(cpu_s / 3600 * usd_per_cpu_hour, 6))


def budget_problems(predicted: Predicted, caps: Caps) -> list[Problem]:
    """What is over a cap."""
    problems = []
    if predicted.cpu_s > caps.cpu_s:
        problems.append(
            _over("cpu_s", f"{predicted.cpu_s:.0f} CPU-seconds", f"at most {caps.cpu_s:.0f}")
        )
    if caps.usd is not None and predicted.usd > caps.usd:
        problems.append(_over("usd", f"${predicted.usd:.4f}", f"at most ${caps.usd:.4f}"))
    return problems


def _over(code: str, cost: str, limit: str) -> Problem:
    return Problem(
        stage="budget",
        code=f"budget.{code}",
        wrong=f"the job would cost about {cost}",
        expected=limit,
        fix="lower max_steps or batch_size",
    )
