"""The section on the sealed hidden set: the same agents on what pays and on what nobody had seen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from nestling.core.seeds import derive_seed
from nestling.outer import stats
from nestling.outer.stats import Estimate
from nestling.report import shown
from nestling.report.paired import by_task
from nestling.report.published.found import Found
from nestling.report.published.markdown import NOT_MEASURED, mean, table
from nestling.report.run_data import EpisodeRow, RunData

__all__ = ["SEALED_FILE", "sealed_section"]

SEALED_FILE: Final = "arc/sealed-set-c.json"
"""Of `nestling eval-agent --sealed --out`, in the folder of results."""


def sealed_section(found: Found) -> list[str]:
    """Scores on A, B and C side by side; nothing until C was opened."""
    sealed = found.sealed
    if sealed is None:
        return []
    families = sealed["families"]
    rows = [_untrained(sealed, found.sweeps.values())]
    apart: set[str] = set()
    for label, row in sealed["arms"].items():
        paid = _paid(found.sweeps.values(), row["arm"], families)
        if paid is not None:
            apart |= _differing(sealed, *paid)
        for name, key in (("reward", "reward"), ("hidden score of its trained models", "post")):
            on_b = mean(_mean(paid[1], key) if paid else None)
            rows.append([f"{label}: {name}", "", on_b, _on_c(row, key)])
    columns = ["", "A, what agents may ask for", "B, what pays", "C, sealed"]
    return [
        "## Sealed set C",
        "",
        f"`nestling eval-agent --sealed`, commit {sealed['commit'] or 'not recorded'}: {_opened(sealed)}. Commitment",
        f"`{sealed['commitment']}`. Families: {', '.join(families)}, {sealed['eval_items']} items of each set a score.",
        "Intervals are over episodes. A holds no scores of trained models. The first row is a mean over families.",
        *sorted(apart),
        "",
        *table(columns, rows),
    ]


def _opened(sealed: Mapping[str, Any]) -> str:
    if sealed["opened"] == 1:
        return f"opened once, {sealed['opened_at']}"
    return (
        f"opened {sealed['opened']} times, this one is opening {sealed['opened_before'] + 1}, "
        f"{sealed['opened_at']}, so C is no longer unseen"
    )


def _untrained(sealed: Mapping[str, Any], sweeps: Collection[RunData]) -> list[str]:
    families = sealed["families"]
    asked = {name: max(scores.values()) for name, scores in sealed["baselines_a"].items()}
    on_b = {
        one.family: one.best_pre
        for data in sweeps
        for one in data.episodes
        if one.best_pre is not None
    }
    each = (_over(families, scores) for scores in (asked, on_b, sealed["best_pre"]))
    return ["best untrained base", *each]


def _over(families: Sequence[str], scores: Mapping[str, float]) -> str:
    if not set(families) <= scores.keys():
        return NOT_MEASURED
    return shown.number(sum(scores[one] for one in families) / len(families))


_Paid = tuple[RunData, list[EpisodeRow]]


def _paid(sweeps: Collection[RunData], arm: str, families: Sequence[str]) -> _Paid | None:
    """Where the same weights met the same families on B."""
    for data in sweeps:
        tasks = by_task(data.episodes, arm, families)
        if {one.family for one in tasks.values()} == set(families):
            return data, list(tasks.values())
    return None


def _differing(
    sealed: Mapping[str, Any], data: RunData, episodes: Sequence[EpisodeRow]
) -> set[str]:
    """What besides the set differs between B and C; nothing when the tasks are the same."""
    config = data.info.config
    lines = set()
    if config.get("outer", {}).get("seed") != sealed["seed"]:
        lines.add("B was measured on other tasks (another seed).")
    if config.get("inner", {}).get("eval_items") != sealed["eval_items"]:
        lines.add("B was measured with another number of items.")
    if {len(episodes)} != {row["n"] + row["dead"] for row in sealed["arms"].values()}:
        lines.add("B was measured with another number of episodes.")
    return lines


def _mean(episodes: Sequence[EpisodeRow], key: str) -> Estimate | None:
    values = [value for one in episodes if (value := getattr(one, key)) is not None]
    return stats.mean(values, seed=derive_seed(0, "sealed", key))


def _on_c(row: Mapping[str, Any], key: str) -> str:
    value = row[f"{key}_mean"]
    if value is None:
        return NOT_MEASURED
    low, high = row[f"{key}_ci"] or (None, None)
    n = row["n"] if key == "reward" else row[f"{key}_n"]
    return mean(Estimate(mean=value, lo=low, hi=high, n=n))
