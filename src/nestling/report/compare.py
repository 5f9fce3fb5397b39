"""Several runs side by side: what differs between them, in settings and in results."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nestling.core.seeds import derive_seed
from nestling.outer import stats
from nestling.outer.stats import Estimate
from nestling.report.gather import gather
from nestling.report.reference_rows import is_checkpoint
from nestling.report.run_data import EpisodeRow, RunData
from nestling.report.run_info import flatten

__all__ = ["Compared", "Difference", "SettingRow", "compare_runs", "differing_settings"]

_SAME_BY_NATURE = ("name",)
"""Settings that tell runs apart and change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One run under a name that no other run of the comparison has."""

    label: str
    data: RunData


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Reward of the trained agent of one run minus that of another, over the same tasks."""

    first: str
    second: str
    families: str
    """training or held-out."""
    difference: Estimate | None
    """None when no task was measured in both with the same seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """A setting that is not the same in all runs; None where a run does not have it."""

    name: str
    values: tuple[str | None, ...]


def compare_runs(folders: Sequence[Path]) -> tuple[list[Compared], list[Difference]]:
    """Runs in the order given, and each pair's differences; raises `StoreError` as `gather` does."""
    data = [gather(folder) for folder in folders]
    names = _labels([one.info.name for one in data])
    runs = [Compared(label=name, data=one) for name, one in zip(names, data, strict=True)]
    differences = [
        _difference(second, first, families)
        for first, second in itertools.combinations(runs, 2)
        for families in ("training", "held-out")
    ]
    return runs, differences


def differing_settings(runs: Sequence[Compared]) -> list[SettingRow]:
    """Settings on which the runs do not agree, by dotted name."""
    flat = [{name: str(value) for name, value in flatten(one.data.info.config)} for one in runs]
    names = dict.fromkeys(name for one in flat for name in one)
    rows = [
        SettingRow(name=name, values=tuple(one.get(name) for one in flat))
        for name in names
        if name not in _SAME_BY_NATURE
    ]
    return [row for row in rows if len(set(row.values)) > 1]


def _labels(names: Sequence[str]) -> list[str]:
    """Equal names get a number."""
    found: list[str] = []
    for name in names:
        label, number = name, 2
        while label in found:
            label, number = f"{name} ({number})", number + 1
        found.append(label)
    return found


def _difference(first: Compared, second: Compared, families: str) -> Difference:
    """Paired by family and place in the sweep, which is the same task when the sweeps' seeds are."""
    pairs: list[tuple[float, float]] = []
    if _sweep_seed(first.data) is not None and _sweep_seed(first.data) == _sweep_seed(second.data):
        rewards = [_measured(one.data, families) for one in (first, second)]
        places = sorted(rewards[0].keys() & rewards[1].keys())
        pairs = [(rewards[0][place], rewards[1][place]) for place in places]
    return Difference(
        first=first.label,
        second=second.label,
        families=families,
        difference=stats.paired_difference(
            [a for a, _ in pairs],
            [b for _, b in pairs],
            seed=derive_seed(0, "compare", families),
        ),
    )


def _sweep_seed(data: RunData) -> int | None:
    seeds = {sweep.seed for sweep in data.sweeps.values()}
    return seeds.pop() if len(seeds) == 1 else None


def _measured(data: RunData, families: str) -> Mapping[tuple[str, int], float]:
    """Rewards of the newest measured checkpoint by task."""

    def fits(one: EpisodeRow) -> bool:
        is_training = one.family in data.training_families
        return (
            one.arm is not None
            and is_checkpoint(one.arm)
            and is_training == (families == "training")
        )

    found = [one for one in data.episodes if fits(one)]
    newest = max((one.step or 0 for one in found), default=None)
    return {(one.family, one.member): one.reward for one in found if one.step == newest}
