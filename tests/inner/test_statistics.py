import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from nestling.inner.statistics import mean_interval, paired_difference


def test_equal_scores_give_exactly_zero_and_no_width() -> None:
    scores = [1.0, 0.0, 1.0, 1.0]
    interval = paired_difference(scores, scores)
    assert (interval.mean, interval.lo, interval.hi, interval.n) == (0.0, 0.0, 0.0, 4)


def test_interval_is_the_students_t_interval() -> None:
    values = [0.1, 0.4, -0.2, 0.35, 0.0]
    interval = mean_interval(values)
    sem = stats.sem(values)
    lo, hi = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=sem)
    assert interval.mean == pytest.approx(np.mean(values))
    assert (interval.lo, interval.hi) == (pytest.approx(lo), pytest.approx(hi))


def test_uplift_arithmetic_by_hand() -> None:
    # differences: +1 three times, -1 once, 0 six times; mean .2, sample variance .4
    after = [1, 1, 1, 0, 1, 1, 1, 0, 0, 0]
    before = [0, 0, 0, 1, 1, 1, 1, 0, 0, 0]
    interval = paired_difference(after, before)
    half = 2.2621572 * (0.4 / 10) ** 0.5
    assert interval.mean == pytest.approx(0.2)
    assert interval.lo == pytest.approx(0.2 - half)
    assert interval.hi == pytest.approx(0.2 + half)


def test_paired_scores_of_different_length_are_an_error() -> None:
    with pytest.raises(ValueError, match="equal lengths"):
        paired_difference([1.0], [1.0, 0.0])


def test_interval_of_a_hundred_draws_covers_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        interval = mean_interval(rng.choice([-1.0, 0.0, 1.0], p=[0.1, 0.6, 0.3], size=100).tolist())
        covered += interval.lo <= 0.2 <= interval.hi
    assert 0.92 <= covered / 400 <= 0.98


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=50))
def test_interval_holds_its_mean_and_stays_in_range(pairs: list[tuple[bool, bool]]) -> None:
    interval = paired_difference([a for a, _ in pairs], [b for _, b in pairs])
    assert -1.0 <= interval.lo <= interval.mean <= interval.hi <= 1.0
