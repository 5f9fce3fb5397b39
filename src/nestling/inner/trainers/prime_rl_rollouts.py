"""What metrics.jsonl does not say of a step: spread of rewards, groups that differ, a few rollouts as text.

Read from `rollouts/step_N/train/effective/traces.jsonl`, one verifiers episode a line (commit 559b447). The job's
code can write there too, so whatever does not fit is passed over.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nestling.jobs.outcome import SampleRollout

__all__ = ["StepRollouts", "read_rollouts"]

_MAX_BYTES: Final = 64 * 2**20
_NUM_SAMPLES: Final = 2
_MAX_SAMPLE_CHARS: Final = 3_000

_Json = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """Zeros when prime-rl wrote no rollouts."""

    reward_mean: float = 0.0
    reward_std: float = 0.0
    varied_groups: int = 0
    """Groups whose rewards are not all equal: those that carry a gradient."""
    samples: tuple[SampleRollout, ...] = ()


def read_rollouts(run: Path, step: int, *, with_text: bool) -> StepRollouts:
    """Of one step, as prime-rl counts."""
    rewards: list[float] = []
    groups: dict[str, list[float]] = {}
    samples: list[SampleRollout] = []
    for episode in _episodes(run / "rollouts" / f"step_{step}" / "train" / "effective"):
        group = episode.get("group")
        name = group.get("id") if isinstance(group, dict) else None
        for trace in _dicts(episode.get("traces")):
            reward = _reward(trace.get("rewards"))
            rewards.append(reward)
            groups.setdefault(str(name), []).append(reward)
            first = len(groups[str(name)]) == 1
            if with_text and first and len(samples) < _NUM_SAMPLES:
                samples.append(SampleRollout(text=_text(trace), reward=reward))
    if not rewards:
        return StepRollouts()
    return StepRollouts(
        reward_mean=statistics.fmean(rewards),
        reward_std=statistics.pstdev(rewards),
        varied_groups=sum(max(group) > min(group) for group in groups.values()),
        samples=tuple(samples),
    )


def _episodes(folder: Path) -> Iterator[dict[str, _Json]]:
    try:
        with (folder / "traces.jsonl").open("rb") as file:
            data = file.read(_MAX_BYTES)
    except OSError:
        return
    for line in data.splitlines():
        try:
            episode = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(episode, dict):
            yield episode


def _dicts(value: _Json) -> list[dict[str, _Json]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _reward(rewards: _Json) -> float:
    """The weighted sum, as `Trace.reward` of verifiers."""
    parts = rewards.values() if isinstance(rewards, dict) else ()
    total = sum(
        _number(part.get("score"), 0.0) * _number(part.get("weight"), 1.0)
        for part in parts
        if isinstance(part, dict)
    )
    return total if math.isfinite(total) else 0.0


def _number(value: _Json, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default


def _text(trace: dict[str, _Json]) -> str:
    """Messages with their roles; calls as JSON."""
    lines = []
    for node in _dicts(trace.get("nodes")):
        message = node.get("message")
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content) if content else ""
        calls = [json.dumps(call) for call in _dicts(message.get("tool_calls"))]
        lines.append(f"<{message.get('role')}> " + " ".join([text, *calls]).strip())
    return "\n".join(lines)[:_MAX_SAMPLE_CHARS]
