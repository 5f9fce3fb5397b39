"""Does the best job depend on the family? The best fixed job against the best job of each family.

The job with the highest measured reward owes part of it to luck, and the more so the more jobs it was
picked from. So a job is chosen on one share of the evidence and paid on the other: by seeds where every
job has two, else by noise (Leiner et al., "Data fission", 2023): with z drawn from N(0, 1), x + s z and
x - s z are independent for x with standard deviation s. That spread comes from jobs with several seeds.
Chosen on half the evidence, jobs are chosen a little worse than they could be: the flattered gap is too
large, the cross-fitted one rather too small.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nestling.agent.reward import RewardKind
from nestling.bench.markdown import circumstances, table_text
from nestling.bench.record import BenchRecord, Measured
from nestling.bench.response_data import EVAL_RANGE, Job, Trial, read_trials
from nestling.core.errors import ConfigError
from nestling.inner.statistics import Interval, mean_interval

__all__ = ["CHOICE_COLUMNS", "TARGET", "choice_rows", "measure", "page", "summarise", "verdict"]

TARGET: Final = 0.05
"""Gap in mean reward from which reading the family's spec is worth something."""
CHOICE_COLUMNS: Final = (
    "choice", "levels compared", "best for all", "best by family", "flattered gap", "gap",
    "95 %, families", "95 %, seeds", "depends on the family",
)  # fmt: skip
_COLUMNS: Final = (
    "family", "jobs", "best job", "reward", "best fixed job there", "flattered gap", "gap",
    "95 %, families", "95 %, seeds",
)  # fmt: skip
_DRAWS: Final = 4000
_IN_NUMBERS: Final = "data in numbers"
"""The choice of data without the level that means another range in each family."""
_CHOICES: Final = ("base", "data", _IN_NUMBERS, *Job._fields[2:])

Array = npt.NDArray[np.float64]


def measure(
    paths: Sequence[Path],
    *,
    families: Sequence[str],
    kind: RewardKind = "seed",
    seed: int = 0,
) -> Measured:
    """Read the files and compare.

    Args:
        paths: job-response data, or records of `bench spread`.
        families: over which jobs are compared; all must be in the data.
        kind: which reward.
        seed: of the noise by which evidence is split.

    Raises:
        ConfigError: unreadable data, or too little of it.
    """
    trials = read_trials(paths, kind)
    figures = summarise(trials, families, seed=seed)
    return Measured(
        settings={
            "data": [str(path) for path in paths],
            "families": list(families),
            "reward": kind,
            "seed": seed,
        },
        runs=(),
        figures=figures,
        columns=_COLUMNS,
        rows=tuple(_rows(figures)),
    )


def summarise(trials: Sequence[Trial], families: Sequence[str], *, seed: int = 0) -> dict[str, Any]:
    """All figures; gaps are in mean reward, intervals at 95 % (t) over families, and over seeds where each job has two.

    The first asks of families like these, the second of these families alone: a choice that pays in one family of five cannot
    be shown by the first, however much it pays there.

    `gap` compares jobs that were measured on every family. `gap_any` lets a family choose among all jobs that were
    measured on it, so it also counts jobs that could not be tried as the fixed one.

    Raises:
        ConfigError: a family without data, no job in common, or no job with two seeds.
    """
    cells = _Cells([one for one in trials if one.family in families], seed)
    if missing := [family for family in families if family not in cells.jobs]:
        raise ConfigError(
            f"the data has no job of {missing[0]}; expected some of each family; choose --families out of "
            f"{', '.join(dict.fromkeys(one.family for one in trials))}"
        )
    common = [
        job
        for job in cells.jobs[families[0]]
        if all(job in cells.jobs[family] for family in families)
    ]
    if not common:
        raise ConfigError(
            f"no job was measured on all of {', '.join(families)}; expected at least one; name fewer families"
        )
    rows = [[cells.index(family, job) for job in common] for family in families]
    own = [list(cells.jobs[family].values()) for family in families]
    among, anywhere = _compare(rows, rows, cells), _compare(rows, own, cells)
    names = {index: job.label() for jobs in cells.jobs.values() for job, index in jobs.items()}
    return {
        "target": TARGET,
        "trials": len(cells.trials),
        "split": cells.split,
        "noise_sd": cells.noise_sd,
        "common_jobs": len(common),
        "fixed": {
            "job": common[among.fixed].label(),
            "reward": fmean(cells.mean[row[among.fixed]] for row in rows),
        },
        "families": {
            family: {
                "jobs": cells.count(family),
                "best": names[among.best[place]],
                "reward": float(cells.mean[among.best[place]]),
                "fixed_reward": float(cells.mean[rows[place][among.fixed]]),
                "gap": among.gaps[place],
                "best_any": names[anywhere.best[place]],
                "reward_any": float(cells.mean[anywhere.best[place]]),
                "gap_any": anywhere.gaps[place],
            }
            for place, family in enumerate(families)
        },
        "gap": among.figures(),
        "gap_any": anywhere.figures(),
        "is_target_reached": among.interval.mean >= TARGET,
        "choices": {choice: _choice(choice, cells, families) for choice in _CHOICES},
    }


def choice_rows(figures: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Which choices depend on the family, as a table under `CHOICE_COLUMNS`."""
    return [(choice, *_choice_cells(one)) for choice, one in figures["choices"].items()]


def verdict(figures: Mapping[str, Any]) -> str:
    """What was found, in three sentences."""
    gap, most = figures["gap"], figures["gap_any"]["flattered"]
    depending = [choice for choice, one in figures["choices"].items() if one["depends"]]
    interval = "" if gap["ci"] is None else f"95 % {gap['ci'][0]:+.3f} to {gap['ci'][1]:+.3f}, "
    seeds = gap["ci_over_seeds"]
    again = (
        ""
        if seeds is None
        else f", {seeds[0]:+.3f} to {seeds[1]:+.3f} over {gap['n_seeds']} training seeds of these"
    )
    size = "at least" if figures["is_target_reached"] else "below"
    return (
        f"Choosing the job by family instead of the best fixed one changes the mean reward by {gap['cross_fitted']:+.3f} "
        f"({interval}cross-fitted over {gap['n_families']} families and {figures['common_jobs']} jobs measured on all{again}): "
        f"{size} {TARGET:g}. On the very data it was chosen by: {gap['flattered']:+.3f}, and {most:+.3f} with each family "
        f"free to take any job measured there. Choices shown to depend on the family: {', '.join(depending) or 'none'}."
    )


def page(record: BenchRecord) -> str:
    """Both tables and the verdict as Markdown."""
    figures, settings = record.figures, record.settings
    noise = (
        "" if figures["noise_sd"] is None else f", {figures['noise_sd']:.3f} over training seeds"
    )
    return (
        "# Best fixed job against the best job of each family\n\n"
        f"{verdict(figures)}\n\n"
        f"`{settings['reward']}` reward of {figures['trials']} trained jobs, paid as accepted at the first attempt. Evidence "
        f"split by {figures['split']} (standard deviation of a reward{noise}). {circumstances(record)}\n"
        f"{table_text(_COLUMNS, _rows(figures))}\n"
        "## Which choices depend on the family\n\n"
        "One choice at a time, everything else as in the job that was varied most in each family; `eval` is the range that "
        "the family's spec gives.\n\n"
        f"{table_text(CHOICE_COLUMNS, choice_rows(figures))}"
    )


class _Cells:
    """One cell for each family and job: its mean reward, and ways to split the evidence for it.

    Legend: C cells, N trials, S splits.
    """

    def __init__(self, trials: Sequence[Trial], seed: int) -> None:
        self.trials = trials
        self.jobs: dict[str, dict[Job, int]] = defaultdict(dict)
        """Family to job to cell."""
        members: list[list[int]] = []
        for place, trial in enumerate(trials):
            for job in trial.jobs:
                index = self.jobs[trial.family].setdefault(job, len(members))
                if index == len(members):
                    members.append([])
                members[index].append(place)
        self._members = members
        self._rewards_N = np.array([one.reward for one in trials], dtype=np.float64)
        self.mean = self._weights(members) @ self._rewards_N
        self.noise_sd = _noise_sd([self._rewards_N[one] for one in members])
        folds = min((len(one) for one in members), default=0)
        self.split = "seeds" if folds >= 2 else "noise"
        if self.split == "seeds":
            self.choose_CS, self.judge_CS = self._by_seed(folds)
        else:
            self.choose_CS, self.judge_CS = self._by_noise(np.random.default_rng(seed))

    def index(self, family: str, job: Job) -> int:
        """The cell of a job that was measured there."""
        return self.jobs[family][job]

    def count(self, family: str) -> int:
        """Different jobs that were measured there, whatever names they have."""
        return len({tuple(self._members[cell]) for cell in self.jobs[family].values()})

    def _by_seed(self, folds: int) -> tuple[Array, Array]:
        judged = [[[one[fold]] for one in self._members] for fold in range(folds)]
        others = [
            [[place for rank, place in enumerate(one) if rank != fold] for one in self._members]
            for fold in range(folds)
        ]
        choose = [self._weights(part) @ self._rewards_N for part in others]
        judge = [self._weights(part) @ self._rewards_N for part in judged]
        return np.stack(choose, axis=1), np.stack(judge, axis=1)

    def _by_noise(self, rng: np.random.Generator) -> tuple[Array, Array]:
        if self.noise_sd is None:
            raise ConfigError(
                "every job has one seed, so that chance cannot be told from worth; expected some jobs with two "
                "seeds; name a family that has some, or measure more"
            )
        noise_NS = self.noise_sd * rng.standard_normal((len(self._rewards_N), _DRAWS))
        weights_CN = self._weights(self._members)
        rewards_N1 = self._rewards_N[:, None]
        return weights_CN @ (rewards_N1 + noise_NS), weights_CN @ (rewards_N1 - noise_NS)

    def _weights(self, members: Sequence[Sequence[int]]) -> Array:
        weights_CN = np.zeros((len(members), len(self._rewards_N)))
        for index, places in enumerate(members):
            weights_CN[index, places] = 1.0 / len(places)
        return weights_CN


def _noise_sd(cells: Sequence[Array]) -> float | None:
    """Standard deviation of a reward over training seeds, among jobs worth choosing.

    Pooled over cells with several seeds whose mean is not below the median cell's: jobs that fall apart vary more, and
    are not chosen.
    """
    if not cells:
        return None
    bar = median(float(one.mean()) for one in cells)
    kept = [one for one in cells if one.size > 1 and float(one.mean()) >= bar]
    freedom = sum(one.size - 1 for one in kept)
    if not freedom:
        return None
    return float(np.sqrt(sum(float(((one - one.mean()) ** 2).sum()) for one in kept) / freedom))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    fixed: int
    """Column of the option with the best mean over families."""
    best: list[int]
    """Cell of the best option, by family."""
    flattered: float
    gaps: list[float]
    """Cross-fitted, by family."""
    by_seed: list[float]
    """The mean gap judged on each training seed; empty when evidence was split by noise."""

    @property
    def interval(self) -> Interval:
        """Over families: they are few, and a new one is what the gap is about."""
        return mean_interval(self.gaps)

    @property
    def over_seeds(self) -> Interval | None:
        """Over training seeds, for these families alone: would jobs trained again say the same of them?"""
        return mean_interval(self.by_seed) if len(self.by_seed) > 1 else None

    @property
    def is_shown(self) -> bool:
        """Whether the gap of these families is more than luck in training; without seeds, over families."""
        return (self.over_seeds or self.interval).lo > 0

    def figures(self) -> dict[str, Any]:
        found, seeds = self.interval, self.over_seeds
        return {
            "flattered": self.flattered,
            "cross_fitted": found.mean,
            "ci": [found.lo, found.hi] if found.n > 1 else None,
            "n_families": found.n,
            "ci_over_seeds": None if seeds is None else [seeds.lo, seeds.hi],
            "n_seeds": len(self.by_seed),
        }


def _compare(
    common: Sequence[Sequence[int]], own: Sequence[Sequence[int]], cells: _Cells
) -> _Comparison:
    """Choose one column of `common` for all families, and one of `own` for each.

    Args:
        common: cells by family (row) and option (column).
        own: cells by family that it may choose from.
        cells: what they earned.
    """
    columns = np.array(common)
    mean = cells.mean
    fixed = int(mean[columns].mean(axis=0).argmax())
    best = [row[int(mean[list(row)].argmax())] for row in own]
    flattered = fmean(
        float(mean[cell] - mean[row[fixed]]) for cell, row in zip(best, common, strict=True)
    )
    splits = np.arange(cells.choose_CS.shape[1])
    fixed_S = cells.choose_CS[columns].mean(axis=0).argmax(axis=0)
    gaps, by_family = [], []
    for row, options in zip(columns, own, strict=True):
        offered = np.array(options)
        chosen_S = offered[cells.choose_CS[offered].argmax(axis=0)]
        gap_S = cells.judge_CS[chosen_S, splits] - cells.judge_CS[row[fixed_S], splits]
        gaps.append(float(gap_S.mean()))
        by_family.append(gap_S)
    by_seed = np.mean(by_family, axis=0).tolist() if cells.split == "seeds" else []
    return _Comparison(fixed=fixed, best=best, flattered=flattered, gaps=gaps, by_seed=by_seed)


def _choice(choice: str, cells: _Cells, families: Sequence[str]) -> dict[str, Any]:
    """One choice alone, everything else as in each family's centre."""
    levels = {family: _levels(choice, cells.jobs[family]) for family in families}
    shared = [
        level
        for level in levels[families[0]]
        if all(level in levels[family] for family in families)
    ]
    figures: dict[str, Any] = {
        "rewards": {
            family: {level: float(cells.mean[cell]) for level, cell in found.items()}
            for family, found in levels.items()
        },
        "shared_levels": shared,
        "fixed": None,
        "best": {},
        "gap": None,
        "depends": None,
    }
    if len(shared) < 2:
        return figures
    rows = [[levels[family][level] for level in shared] for family in families]
    found = _compare(rows, rows, cells)
    best = {
        family: shared[row.index(cell)]
        for family, row, cell in zip(families, rows, found.best, strict=True)
    }
    return figures | {
        "fixed": shared[found.fixed],
        "best": best,
        "gap": found.figures(),
        "depends": len(set(best.values())) > 1 and found.is_shown,
    }


def _levels(choice: str, jobs: Mapping[Job, int]) -> dict[str, int]:
    """Level of the choice to cell, for jobs that are otherwise like the centre."""
    place = Job._fields.index("data" if choice == _IN_NUMBERS else choice)
    centre = _centre(jobs)
    left_out = EVAL_RANGE if choice == _IN_NUMBERS else None
    return {
        job[place]: cell
        for job, cell in sorted(jobs.items())
        if job[place] != left_out
        and job[:place] + job[place + 1 :] == centre[:place] + centre[place + 1 :]
    }


def _centre(jobs: Mapping[Job, int]) -> Job:
    """The job from which most others differ in one choice only: the one that was varied."""

    def neighbours(job: Job) -> int:
        return sum(sum(a != b for a, b in zip(job, other, strict=True)) == 1 for other in jobs)

    return max(sorted(jobs), key=neighbours)


def _rows(figures: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            family,
            str(one["jobs"]),
            one["best"],
            f"{one['reward']:.3f}",
            f"{one['fixed_reward']:.3f}",
            f"{one['reward'] - one['fixed_reward']:+.3f}",
            f"{one['gap']:+.3f}",
            "",
            "",
        )
        for family, one in figures["families"].items()
    ]
    reward = fmean(one["reward"] for one in figures["families"].values())
    reward_any = fmean(one["reward_any"] for one in figures["families"].values())
    fixed, measured_there = figures["fixed"], "all measured there"
    rows.append(
        ("mean", str(figures["common_jobs"]), f"fixed: {fixed['job']}", f"{reward:.3f}",
         f"{fixed['reward']:.3f}", *_gap_cells(figures["gap"]))
    )  # fmt: skip
    rows.append(
        ("mean", measured_there, "best of each family", f"{reward_any:.3f}",
         f"{fixed['reward']:.3f}", *_gap_cells(figures["gap_any"]))
    )  # fmt: skip
    return rows


def _choice_cells(one: Mapping[str, Any]) -> tuple[str, ...]:
    levels = "; ".join(one["shared_levels"]) or "-"
    if one["gap"] is None:
        return (levels, "-", "-", "-", "-", "-", "-", "not measured")
    counted = Counter(one["best"].values())
    best = "; ".join(
        f"{level} ({', '.join(family for family, own in one['best'].items() if own == level)})"
        for level, _ in counted.most_common()
    )
    verdict = "yes" if one["depends"] else "not shown"
    return (levels, one["fixed"], best, *_gap_cells(one["gap"]), verdict)


def _gap_cells(gap: Mapping[str, Any]) -> tuple[str, str, str, str]:
    families, seeds = (
        "-" if ends is None else f"{ends[0]:+.3f} to {ends[1]:+.3f}"
        for ends in (gap["ci"], gap["ci_over_seeds"])
    )
    return f"{gap['flattered']:+.3f}", f"{gap['cross_fitted']:+.3f}", families, seeds
