"""How much the jobs of a group differ: a policy that has collapsed writes one job again and again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

__all__ = ["distinct_share", "job_difference"]


def distinct_share(jobs: Sequence[str]) -> float | None:
    """Different ones per job, 1/n to 1; None for fewer than two jobs."""
    return len(set(jobs)) / len(jobs) if len(jobs) > 1 else None


def job_difference(settings: Sequence[str]) -> float | None:
    """Share of choices that differ between two jobs, mean over all pairs; None for fewer than two.

    The choices of a pair: the base model, every `[prime_rl]` key that either of them sets, and every
    `[env]` key that either names. A key that only one of them has differs.
    """
    choices = [_choices(one) for one in settings]
    pairs = list(itertools.combinations(choices, 2))
    if not pairs:
        return None
    return sum(_difference(first, second) for first, second in pairs) / len(pairs)


_ABSENT = object()


def _difference(first: dict[str, object], second: dict[str, object]) -> float:
    names = first.keys() | second.keys()
    differing = sum(first.get(name, _ABSENT) != second.get(name, _ABSENT) for name in names)
    return differing / len(names)


def _choices(settings: str) -> dict[str, object]:
    """`EpisodeRow.settings` as names and values."""
    base, prime_rl, env_keys = json.loads(settings)
    return {
        "base_model": base,
        **{f"prime_rl.{key}": value for key, value in prime_rl.items()},
        **{f"env.{key}": True for key in env_keys},
    }
