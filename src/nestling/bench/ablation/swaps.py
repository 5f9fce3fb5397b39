"""What became of jobs and of their swapped versions, and what the parts earned.

Legend: J jobs, P parts, S seeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final, Literal

from nestling.agent.reward import RewardWeights, Terms
from nestling.bench.ablation.parts import PARTS, Part
from nestling.core.frozen import Frozen
from nestling.outer.stats import cluster_mean

__all__ = ["ALL_FAMILIES", "COLUMNS", "Swap", "figures_of", "rows_of"]

ALL_FAMILIES: Final = "all"
COLUMNS: Final = (
    "part", "family", "jobs", "alike", "not runnable", "died", "n", "reward", "with the template's",
    "earned", "95 % interval", "by quality", "by speed",
)  # fmt: skip
_BOOTSTRAP_SEED: Final = 0


class Swap(Frozen):
    """One job with one part taken from the template."""

    episode_id: str
    task: str
    family: str
    part: Part
    job_hash: str
    swapped_hash: str | None
    """None when the parts could not be taken apart."""
    not_runnable: str = ""
    """Code of why there is no pair; empty when there is one."""
    detail: str = ""
    """The same for people."""
    own: tuple[Terms, ...] = ()
    """Reward of the job as it is, by training seed; none without a pair."""
    swapped: tuple[Terms, ...] = ()
    """Of the job with the template's part, by the same seeds."""
    died: int = 0
    """Swapped trainings that died: they are paid what a dead job is paid."""

    @property
    def is_alike(self) -> bool:
        """The job has the template's part already, so there was nothing to train."""
        return self.swapped_hash == self.job_hash

    def earned(self, term: Literal["total", "validation", "quality", "speed"]) -> float:
        """Mean over seeds of own minus swapped."""
        pairs = zip(self.own, self.swapped, strict=True)
        return fmean(getattr(own, term) - getattr(swapped, term) for own, swapped in pairs)


def figures_of(swaps: Sequence[Swap], weights: RewardWeights) -> dict[str, dict[str, Any]]:
    """By family, and pooled under `all`: what each part earned.

    The interval redraws clusters of pairs: those of one task, and those of equal jobs, which were trained once. It covers
    which jobs the policy writes, not the chance in training the template's part, which all jobs of a family may share:
    more seeds make that small.
    """
    families = list(dict.fromkeys(one.family for one in swaps))
    parts = [part for part in PARTS if any(one.part == part for one in swaps)]
    scopes = {ALL_FAMILIES: swaps} | {
        family: [one for one in swaps if one.family == family] for family in families
    }
    return {
        scope: {
            part: _figures([one for one in found if one.part == part], weights) for part in parts
        }
        for scope, found in scopes.items()
    }


def rows_of(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[tuple[str, ...]]:
    """The table under `COLUMNS`: pooled first; one family alone is told once."""
    scopes = list(figures.items())
    if len(scopes) == 2:
        scopes = scopes[1:]
    return [_cells(part, family, one) for family, parts in scopes for part, one in parts.items()]


def _figures(swaps: Sequence[Swap], weights: RewardWeights) -> dict[str, Any]:
    pairs = [one for one in swaps if not one.not_runnable]
    clusters = _clusters(pairs)
    found = cluster_mean(
        [[one.earned("total") for one in cluster] for cluster in clusters], seed=_BOOTSTRAP_SEED
    )
    return {
        "jobs": len(swaps),
        "alike": sum(one.is_alike for one in pairs),
        "not_runnable": dict(Counter(one.not_runnable for one in swaps if one.not_runnable)),
        "died": sum(one.died > 0 for one in pairs),
        "n": len(pairs),
        "clusters": len(clusters),
        "reward": _mean(terms.total for one in pairs for terms in one.own),
        "reward_swapped": _mean(terms.total for one in pairs for terms in one.swapped),
        "earned": found.mean if found else None,
        "ci": [found.lo, found.hi] if found and found.lo is not None else None,
        "terms": {
            "validation": _mean(weights.validation * one.earned("validation") for one in pairs),
            "quality": _mean(weights.quality * one.earned("quality") for one in pairs),
            "speed": _mean(weights.speed * one.earned("speed") for one in pairs),
        },
    }


def _clusters(pairs: Sequence[Swap]) -> list[list[Swap]]:
    """Pairs that share a task, a job, or both by way of others."""
    cluster_of: dict[tuple[str, ...], list[Swap]] = {}
    for one in pairs:
        keys = (("task", one.task), ("job", one.family, one.job_hash))
        joined = [one]
        for other in {id(found): found for key in keys if (found := cluster_of.get(key))}.values():
            joined += other
        for member in joined:
            cluster_of["task", member.task] = joined
            cluster_of["job", member.family, member.job_hash] = joined
    return list({id(cluster): cluster for cluster in cluster_of.values()}.values())


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


def _cells(part: str, family: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    reasons = ", ".join(f"{count} {code}" for code, count in one["not_runnable"].items())
    return (
        part,
        family,
        str(one["jobs"]),
        str(one["alike"]),
        reasons or "0",
        str(one["died"]),
        str(one["n"]),
        _number(one["reward"]),
        _number(one["reward_swapped"]),
        _number(one["earned"], "+"),
        "-" if one["ci"] is None else f"{one['ci'][0]:+.3f} to {one['ci'][1]:+.3f}",
        _number(one["terms"]["quality"], "+"),
        _number(one["terms"]["speed"], "+"),
    )


def _number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3f}"
