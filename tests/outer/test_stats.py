import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.outer import stats


def test_no_values_give_no_estimate():
    assert stats.mean([], seed=0) is None
    assert stats.sign_flip_p_value([], seed=0) is None


def test_one_value_has_no_interval():
    one = stats.mean([0.4], seed=0)
    assert (one.mean, one.lo, one.hi, one.n) == (0.4, None, None, 1)


def test_interval_is_about_the_normal_one():
    values = np.random.default_rng(3).normal(1.0, 2.0, 400)
    found = stats.mean(values.tolist(), seed=0)
    half = 1.96 * values.std() / 20
    assert found.lo == pytest.approx(values.mean() - half, abs=0.05)
    assert found.hi == pytest.approx(values.mean() + half, abs=0.05)


def test_values_of_one_cluster_count_together():
    rng = np.random.default_rng(0)
    clusters = [[float(centre)] * 20 for centre in rng.normal(size=12)]
    flat = [value for cluster in clusters for value in cluster]
    wide, narrow = stats.cluster_mean(clusters, seed=0), stats.mean(flat, seed=0)
    assert wide.mean == pytest.approx(narrow.mean)
    assert wide.hi - wide.lo > 3 * (narrow.hi - narrow.lo)


def test_small_samples_are_tested_exactly():
    assert stats.sign_flip_p_value([1.0, 1.0, 1.0, 1.0], seed=0) == pytest.approx(2 / 16)
    assert stats.sign_flip_p_value([0.0] * 5, seed=0) == 1.0


def test_p_value_under_the_null_is_uniform_enough():
    rng = np.random.default_rng(1)
    found = [
        stats.sign_flip_p_value(rng.normal(size=30), seed=i, resamples=200) for i in range(300)
    ]
    assert 0.02 < np.mean(np.array(found) <= 0.05) < 0.09


def test_paired_lists_must_match():
    with pytest.raises(ValueError, match="longer"):
        stats.paired_difference([1.0], [1.0, 2.0], seed=0)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=40), st.integers(0, 5))
def test_interval_holds_the_data_range_and_repeats(values, seed):
    first = stats.mean(values, seed=seed, resamples=100)
    assert first == stats.mean(values, seed=seed, resamples=100)
    assert min(values) - 1e-9 <= first.lo <= first.hi <= max(values) + 1e-9


def test_power_statement_is_kept_by_simulated_comparisons():
    rng = np.random.default_rng(4)
    pilot = stats.paired_difference(rng.normal(0, 0.2, 200), np.zeros(200), seed=0)
    found = stats.power(pilot, 0.05)
    assert (found.pairs, found.effect) == (200, 0.05)
    assert 100 < found.pairs_needed < 160
    hits = 0
    for _ in range(400):
        sample = rng.normal(0.05, 0.2, found.pairs_needed)
        hits += abs(sample.mean()) > 1.96 * sample.std(ddof=1) / len(sample) ** 0.5
    assert 0.72 < hits / 400 < 0.88
    assert found.detectable == pytest.approx(0.05 * (found.pairs_needed / 200) ** 0.5, rel=0.02)


def test_power_needs_pairs_and_an_effect():
    single = stats.paired_difference([0.1], [0.0], seed=0)
    assert stats.power(single, 0.05) is None
    equal = stats.paired_difference([0.5] * 20, [0.1] * 20, seed=0)
    assert equal.sd == pytest.approx(0, abs=1e-12)
    assert stats.power(stats.paired_difference([1.0] * 20, [0.0] * 20, seed=0), 0.05) is None
    with pytest.raises(ValueError, match="more than 0"):
        stats.power(single, 0.0)
