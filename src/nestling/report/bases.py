"""Untrained base models: which is better on a family, and how good the best one is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nestling.report.run_data import EpisodeRow
from nestling.store import RunStore

__all__ = ["best_untrained", "better_bases", "shown_baselines"]

_TIE = 1e-9


Shown = Mapping[str, Mapping[str, float]]
"""Untrained scores by family and base, as agents were shown them."""


def best_untrained(shown: Shown, episodes: Sequence[EpisodeRow]) -> dict[str, float]:
    """Best untrained score by family: from outcomes, else from the baselines agents were shown."""
    found = {family: max(scores.values()) for family, scores in shown.items() if scores}
    for episode in episodes:
        if episode.best_pre is not None:
            found[episode.family] = episode.best_pre
    return found


def better_bases(shown: Shown, episodes: Sequence[EpisodeRow]) -> dict[str, str]:
    """The better base by family, on the items that pay; left out where bases tie or none is known.

    A job's own outcome tells when its base is the best one. Where no outcome does, the baselines
    that the agents were shown decide.
    """
    found = {}
    for family, scores in shown.items():
        best = max(scores.values(), default=0.0)
        names = [name for name, score in scores.items() if score >= best - _TIE]
        if len(names) == 1 and len(scores) > 1:
            found[family] = names[0]
    best_ones: dict[str, set[str]] = {}
    for one in episodes:
        if one.base_model is not None and one.pre is not None and one.best_pre is not None:
            names_of_family = best_ones.setdefault(one.family, set())
            if one.pre >= one.best_pre - _TIE:
                names_of_family.add(one.base_model)
    for family, bases in best_ones.items():
        if len(bases) == 1:
            found[family] = next(iter(bases))
        elif len(bases) > 1:
            found.pop(family, None)
    return found


def shown_baselines(store: RunStore) -> dict[str, dict[str, float]]:
    """What `get_baseline_scores` answered, by family."""
    return {
        job.family: {str(name): float(score) for name, score in job.result.items()}
        for job in store.jobs.all(state="done", kind="baseline")
        if job.family is not None and isinstance(job.result, dict)
    }
