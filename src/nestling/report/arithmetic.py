"""How a reward came about, written out as a person would check it."""

from __future__ import annotations

from nestling.agent.episode_result import EpisodeResult
from nestling.agent.reward import RewardWeights, Terms

__all__ = ["formula_lines", "reward_lines"]

_CLOSE = 1e-6


def formula_lines(weights: RewardWeights, kind: str) -> list[str]:
    """The rule itself, with the enforced numbers."""
    attempts = ", ".join(
        f"{share:g} at attempt {number}" for number, share in enumerate(weights.by_attempt, start=1)
    )
    lines = [
        f"reward = {weights.validation:g} × validation + {weights.quality:g} × quality "
        f"+ {weights.speed:g} × speed",
        f"validation = {attempts}; 0 when no submission is accepted",
    ]
    if kind == "seed":
        lines += [
            f"quality = {weights.post_share:g} × post + {1 - weights.post_share:g} × uplift_term; "
            f"0 when the job dies",
            "uplift_term = (post − best_pre) / (1 − best_pre) above best_pre, "
            "(post − best_pre) / best_pre below it",
            "speed = 1 − share of the rollout budget used, for scored jobs",
        ]
    else:
        lines += [
            "quality = uplift_term of the end of the 95 % interval of post − best_pre that is "
            "nearer to 0; 0 when it covers 0",
            "speed = 1 − share of the rollout budget used, only with quality above 0",
        ]
    return [
        *lines,
        f"an episode without one readable submission is paid {weights.no_submission:g} in all",
    ]


def reward_lines(result: EpisodeResult, weights: RewardWeights) -> list[str]:
    """One episode's reward step by step; says so when the weights do not give the recorded total."""
    terms = result.terms[result.reward_kind]
    if terms.no_submission:
        return [f"no readable submission: reward = {terms.total:.4f}"]
    lines = [_validation_line(result, terms)]
    lines += _quality_lines(result, terms, weights)
    lines.append(f"speed = {terms.speed:.4f}")
    total = (
        weights.validation * terms.validation
        + weights.quality * terms.quality
        + weights.speed * terms.speed
    )
    lines.append(
        f"reward = {weights.validation:g} × {terms.validation:.4f} + {weights.quality:g} × "
        f"{_signed(terms.quality)} + {weights.speed:g} × {terms.speed:.4f} = {total:.4f}"
    )
    if abs(total - terms.total) > _CLOSE:
        lines.append(
            f"recorded reward: {terms.total:.4f}; it differs, so the run used other weights than "
            f"the ones shown here"
        )
    return lines


def _validation_line(result: EpisodeResult, terms: Terms) -> str:
    if result.valid_attempt is None:
        return f"validation = {terms.validation:.4f}: no submission was accepted"
    return f"validation = {terms.validation:.4f}: attempt {result.valid_attempt} was accepted"


def _quality_lines(result: EpisodeResult, terms: Terms, weights: RewardWeights) -> list[str]:
    outcome = result.outcome
    if terms.post is None or outcome is None or outcome.best_pre is None:
        return [f"quality = {terms.quality:.4f}: no trained model was scored"]
    post, best, uplift = terms.post, outcome.best_pre, terms.uplift or 0.0
    if terms.kind == "paired":
        interval = outcome.uplift_ci
        shown = "none" if interval is None else f"[{interval[0]:+.4f}, {interval[1]:+.4f}]"
        return [
            f"post − best_pre = {post:.4f} − {best:.4f} = {post - best:+.4f}, 95 % interval {shown}",
            f"quality = {terms.quality:.4f}",
        ]
    room, name = (1 - best, "(1 − best_pre)") if post > best else (best, "best_pre")
    lines = ["uplift_term = 0: post equals best_pre"]
    if post != best:
        lines = [
            f"uplift_term = (post − best_pre) / {name} = ({post:.4f} − {best:.4f}) / {room:.4f} "
            f"= {uplift:+.4f}"
        ]
    share = weights.post_share
    lines.append(
        f"quality = {share:g} × {post:.4f} + {1 - share:g} × {_signed(uplift)} "
        f"= {terms.quality:.4f}"
    )
    return lines


def _signed(value: float) -> str:
    return f"({value:.4f})" if value < 0 else f"{value:.4f}"
