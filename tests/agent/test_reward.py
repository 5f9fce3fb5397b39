"""The reward formulas: tables from the published one, laws for both."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nestling.agent.reward import (
    RewardWeights,
    Terms,
    compute_terms,
    no_op_reward,
    shown_gain,
    uplift_term,
)
from nestling.jobs.outcome import Outcome

PUBLISHED_BEST_PRE = {
    "calc_chain": 0.742,
    "multi_hop": 0.654,
    "string_pipeline": 0.545,
    "ledger": 0.242,
    "dispatch": 0.323,
}
HELD_OUT_BEST_PRE = 0.352


def outcome(
    post: float | None = 0.5,
    best_pre: float | None = 0.3,
    *,
    half_width: float = 0.05,
    **changes: object,
) -> Outcome:
    uplift = None if post is None or best_pre is None else post - best_pre
    fields: dict[str, object] = {
        "job_hash": "h",
        "family": "ledger",
        "base_model": "micro",
        "status": "succeeded",
        "post": post,
        "best_pre": best_pre,
        "uplift": uplift,
        "uplift_ci": None if uplift is None else (uplift - half_width, uplift + half_width),
        "base_hash": "a",
        "final_hash": "b",
    }
    return Outcome.model_validate(fields | changes)


def seed(result: Outcome | None, attempt: int | None = 1, share: float = 0.5) -> Terms:
    return compute_terms(result, valid_attempt=attempt, submitted=True, budget_share=share)["seed"]


def paired(result: Outcome | None, attempt: int | None = 1, share: float = 0.5) -> Terms:
    return compute_terms(result, valid_attempt=attempt, submitted=True, budget_share=share)[
        "paired"
    ]


def test_seed_reward_is_the_published_formula() -> None:
    terms = seed(outcome(post=0.65, best_pre=0.3))
    assert terms.validation == 1.0
    assert terms.uplift == pytest.approx(0.5)
    assert terms.quality == pytest.approx(0.25 * 0.65 + 0.75 * 0.5)
    assert terms.speed == 0.5
    assert terms.total == pytest.approx(0.35 + 0.60 * (0.25 * 0.65 + 0.75 * 0.5) + 0.05 * 0.5)


@pytest.mark.parametrize(("attempt", "validation"), [(1, 1.0), (2, 0.8), (3, 0.6), (None, 0.0)])
def test_validation_falls_with_attempts(attempt: int | None, validation: float) -> None:
    assert seed(None, attempt).validation == validation
    assert seed(None, attempt).total == pytest.approx(0.35 * validation)


def test_attempt_beyond_the_cap_is_our_bug() -> None:
    with pytest.raises(ValueError, match="attempt 4"):
        seed(None, 4)


@pytest.mark.parametrize(
    ("post", "best_pre", "term"),
    [
        (0.3, 0.3, 0.0),
        (1.0, 0.3, 1.0),
        (0.15, 0.3, -0.5),
        (0.0, 0.3, -1.0),
        (1.0, 1.0, 0.0),
        (0.5, 1.0, -0.5),
        (0.0, 0.0, 0.0),
        (0.5, 0.0, 0.5),
    ],
)
def test_uplift_term(post: float, best_pre: float, term: float) -> None:
    assert uplift_term(post, best_pre) == pytest.approx(term)


def test_nothing_readable_submitted_costs_a_tenth() -> None:
    both = compute_terms(None, valid_attempt=None, submitted=False, budget_share=1.0)
    assert {kind: terms.total for kind, terms in both.items()} == {"seed": -0.1, "paired": -0.1}
    assert both["seed"].no_submission


@pytest.mark.parametrize("status", ["failed", "timed_out", "lost"])
def test_dead_job_keeps_its_validation_term_only(status: str) -> None:
    terms = seed(outcome(None, status=status, reason="train.diverged"), attempt=2, share=0.0)
    assert (terms.validation, terms.quality, terms.speed) == (0.8, 0.0, 0.0)
    assert terms.total == pytest.approx(0.28)


def test_dead_job_with_scores_is_still_dead() -> None:
    assert seed(outcome(0.9, status="failed", reason="scorer.lineage")).quality == 0.0


def test_paired_withholds_validation_when_agent_code_killed_the_job() -> None:
    dead = outcome(None, status="failed", reason="env.crashed")
    assert paired(dead).total == 0.0
    assert seed(dead).total == pytest.approx(0.35)
    no_jail = outcome(None, status="failed", reason="env.jail.start")
    assert paired(no_jail).total == pytest.approx(0.35)
    assert paired(outcome(None, status="lost", reason="worker.lost")).total == pytest.approx(0.35)


def test_published_no_op_line() -> None:
    """0.35 + 0.15 best_pre is 0.425 on the mean; with the speed term 0.475; triage 0.40 to 0.45."""
    with_speed = fmean(no_op_reward(score) for score in PUBLISHED_BEST_PRE.values())
    assert with_speed == pytest.approx(0.35 + 0.15 * 0.5012 + 0.05)
    assert with_speed == pytest.approx(0.475, abs=0.005)
    assert with_speed - 0.05 == pytest.approx(0.43, abs=0.006)
    assert no_op_reward(HELD_OUT_BEST_PRE) == pytest.approx(0.45, abs=0.005)
    assert no_op_reward(HELD_OUT_BEST_PRE) - 0.05 == pytest.approx(0.40, abs=0.005)


@pytest.mark.parametrize("best_pre", PUBLISHED_BEST_PRE.values())
def test_no_op_line_is_what_an_unchanged_model_earns(best_pre: float) -> None:
    unchanged = outcome(best_pre, best_pre, final_hash="a")
    assert seed(unchanged, share=0.0).total == pytest.approx(no_op_reward(best_pre))
    assert paired(unchanged, share=0.0).total == no_op_reward(best_pre, kind="paired") == 0.35


def test_unchanged_weights_earn_no_paired_quality_whatever_the_scores() -> None:
    assert paired(outcome(0.9, 0.3, final_hash="a")).quality == 0.0


@pytest.mark.parametrize(
    ("ci", "gain"),
    [
        (None, 0.0),
        ((-0.1, 0.2), 0.0),
        ((0.0, 0.2), 0.0),
        ((0.14, 0.4), 0.2),
        ((-0.3, -0.15), -0.5),
        ((0.7, 0.7), 1.0),
        ((-1.0, -1.0), -1.0),
    ],
)
def test_shown_gain_is_the_end_of_the_interval_nearer_to_zero(
    ci: tuple[float, float] | None, gain: float
) -> None:
    assert shown_gain(ci, 0.3) == pytest.approx(gain)


def test_paired_speed_needs_a_gain() -> None:
    assert paired(outcome(0.31, 0.3), share=0.0).total == 0.35
    assert paired(outcome(0.6, 0.3), share=0.2).speed == pytest.approx(0.8)


SCORES = st.floats(0, 1)
ATTEMPTS = st.sampled_from([1, 2, 3, None])


@given(post=SCORES, best_pre=SCORES, attempt=ATTEMPTS, share=SCORES, half_width=st.floats(0, 0.5))
def test_rewards_and_terms_stay_in_range(
    post: float, best_pre: float, attempt: int | None, share: float, half_width: float
) -> None:
    result = outcome(post, best_pre, half_width=half_width)
    for terms in (seed(result, attempt, share), paired(result, attempt, share)):
        assert 0 <= terms.validation <= 1
        assert -1 <= terms.quality <= 1
        assert 0 <= terms.speed <= 1
        assert -0.6 <= terms.total <= 1
        assert terms.total == pytest.approx(
            0.35 * terms.validation + 0.6 * terms.quality + 0.05 * terms.speed
        )


@given(posts=st.tuples(SCORES, SCORES), best_pre=SCORES, half_width=st.floats(0, 0.3))
def test_a_better_model_never_earns_less(
    posts: tuple[float, float], best_pre: float, half_width: float
) -> None:
    low, high = sorted(posts)
    for reward in (seed, paired):
        worse = reward(outcome(low, best_pre, half_width=half_width)).total
        better = reward(outcome(high, best_pre, half_width=half_width)).total
        assert worse <= better + 1e-12


@given(best_pre=SCORES, weaker=SCORES, share=SCORES, half_width=st.floats(0.0, 0.3))
def test_no_training_earns_at_most_the_validation_share_when_paired(
    best_pre: float, weaker: float, share: float, half_width: float
) -> None:
    """The best base untrained, or any weaker base untrained."""
    post = min(weaker, best_pre)
    assert paired(outcome(post, best_pre, half_width=half_width), share=share).total <= 0.35


@given(attempts=st.tuples(st.integers(1, 3), st.integers(1, 3)), post=SCORES)
def test_an_earlier_valid_attempt_never_earns_less(attempts: tuple[int, int], post: float) -> None:
    first, last = sorted(attempts)
    assert seed(outcome(post), first).total >= seed(outcome(post), last).total


@pytest.mark.parametrize(
    "fields",
    [
        {"validation": 0.5},
        {"by_attempt": ()},
        {"by_attempt": (0.5, 0.8)},
        {"by_attempt": (1.2,)},
        {"by_attempt": (1.0, -0.1)},
        {"speeed": 0.05},
    ],
)
def test_weights_that_make_no_sense_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RewardWeights.model_validate(fields)


def test_terms_survive_json() -> None:
    terms = seed(outcome())
    assert Terms.model_validate_json(terms.model_dump_json()) == terms
