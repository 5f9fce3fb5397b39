"""What is counted about finished episodes, and the summary of many of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nestling.agent.episode_result import EpisodeResult
from nestling.core.frozen import Frozen
from nestling.outer import stats
from nestling.outer.stats import Estimate

__all__ = ["EpisodeFacts", "Summary", "facts_of", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFacts:
    """One finished episode in numbers."""

    reward: float
    validation: float
    quality: float
    speed: float
    is_valid: bool
    """A submission passed the probe."""
    is_valid_first: bool
    """The first one did."""
    is_job_done: bool
    """The job trained and was scored."""
    uplift: float | None
    """Trained minus best untrained score; None without a scored job."""
    post: float | None
    base_model: str | None
    """Of the accepted job."""
    config_keys: frozenset[str]
    """`[prime_rl]` keys the accepted job sets itself."""


class Summary(Frozen):
    """Many episodes in numbers."""

    n: int
    reward: Estimate
    reward_worst: float
    reward_best: float
    validation: float
    """Mean of the validation term, and so on."""
    quality: float
    speed: float
    validity: float
    """Share of episodes with an accepted submission."""
    first_try_validity: float
    job_success: float | None
    """Share of accepted jobs that trained and were scored; None when none was accepted."""
    uplift: Estimate | None
    """Over scored jobs."""
    post: Estimate | None
    """Trained score, over scored jobs."""
    base_model_share: dict[str, float]
    """Share of accepted jobs per base model."""
    config_use: float | None
    """Share of accepted jobs that set at least one `[prime_rl]` key."""
    config_keys_mean: float | None
    """`[prime_rl]` keys set per accepted job."""
    config_key_use: dict[str, float]
    """Share of accepted jobs that set this key."""


def facts_of(result: EpisodeResult) -> EpisodeFacts:
    """The numbers of one result; choices count only when the job was accepted."""
    terms = result.terms[result.reward_kind]
    accepted = result.manifest if result.valid_attempt is not None else None
    outcome = result.outcome if result.outcome_code == "job_succeeded" else None
    return EpisodeFacts(
        reward=result.reward,
        validation=terms.validation,
        quality=terms.quality,
        speed=terms.speed,
        is_valid=result.valid_attempt is not None,
        is_valid_first=result.valid_attempt == 1,
        is_job_done=outcome is not None,
        uplift=outcome.uplift if outcome else None,
        post=outcome.post if outcome else None,
        base_model=accepted.base_model if accepted else None,
        config_keys=frozenset(accepted.prime_rl if accepted else ()),
    )


def summarise(
    clusters: Sequence[Sequence[EpisodeFacts]],
    *,
    seed: int,
    confidence: float = 0.95,
    resamples: int = 2_000,
) -> Summary | None:
    """Means with intervals; episodes of one cluster share a task. None for no episode.

    Whole clusters are redrawn, so an interval covers the choice of tasks too. With a single cluster
    episodes are redrawn: the interval then says how well the mean on that one task is known.
    """
    filled = [cluster for cluster in clusters if cluster]
    if len(filled) == 1:
        clusters = [[one] for one in filled[0]]
    facts = [one for cluster in clusters for one in cluster]
    if not facts:
        return None

    def estimate(value: Callable[[EpisodeFacts], float | None]) -> Estimate | None:
        values = [[x for one in cluster if (x := value(one)) is not None] for cluster in clusters]
        return stats.cluster_mean(values, seed=seed, confidence=confidence, resamples=resamples)

    reward = estimate(lambda one: one.reward)
    assert reward is not None
    valid = [one for one in facts if one.is_valid]
    keys = Counter(key for one in valid for key in one.config_keys)
    bases = Counter(one.base_model for one in valid if one.base_model is not None)
    return Summary(
        n=len(facts),
        reward=reward,
        reward_worst=min(one.reward for one in facts),
        reward_best=max(one.reward for one in facts),
        validation=_mean([one.validation for one in facts]),
        quality=_mean([one.quality for one in facts]),
        speed=_mean([one.speed for one in facts]),
        validity=len(valid) / len(facts),
        first_try_validity=_mean([one.is_valid_first for one in facts]),
        job_success=_mean([one.is_job_done for one in valid]) if valid else None,
        uplift=estimate(lambda one: one.uplift),
        post=estimate(lambda one: one.post),
        base_model_share={name: count / len(valid) for name, count in sorted(bases.items())},
        config_use=_mean([bool(one.config_keys) for one in valid]) if valid else None,
        config_keys_mean=_mean([len(one.config_keys) for one in valid]) if valid else None,
        config_key_use={key: count / len(valid) for key, count in sorted(keys.items())},
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
