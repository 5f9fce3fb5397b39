import random
from collections import Counter

import pytest

from nestling.inner.row_sampler import RowSampler


def test_standard_goes_through_the_rows_in_order_and_again() -> None:
    sampler = RowSampler(5, "standard", random.Random(0))
    assert sampler.draw(3) == [0, 1, 2]
    assert sampler.draw(4) == [3, 4, 0, 1]


def test_difficulty_pool_mostly_leaves_solved_and_hopeless_rows_alone() -> None:
    sampler = RowSampler(40, "difficulty_pool", random.Random(0))
    for row in range(40):
        if row < 15:
            sampler.tell(row, [1.0, 1.0])
        elif row < 25:
            sampler.tell(row, [0.0, 0.0])
        else:
            sampler.tell(row, [0.0, 1.0])
    drawn = Counter(row for _ in range(200) for row in sampler.draw(10))
    share = {
        name: sum(count for row, count in drawn.items() if row in rows) / 2000
        for name, rows in {"easy": range(15), "hard": range(15, 25)}.items()
    }
    assert share == {"easy": pytest.approx(0.1), "hard": pytest.approx(0.2)}


def test_difficulty_pool_draws_without_repeats_while_it_can() -> None:
    sampler = RowSampler(8, "difficulty_pool", random.Random(0))
    for row in range(8):
        sampler.tell(row, [0.0, float(row % 2)])
    for _ in range(20):
        assert len(set(sampler.draw(8))) == 8
    assert len(sampler.draw(20)) == 20


@pytest.mark.parametrize("kind", ["standard", "difficulty_pool"])
def test_same_seed_draws_the_same_rows(kind: str) -> None:
    draws = []
    for _ in range(2):
        sampler = RowSampler(30, kind, random.Random(7))
        rows = []
        for step in range(5):
            batch = sampler.draw(4)
            rows.append(batch)
            for row in batch:
                sampler.tell(row, [0.0, float(row % 3 == step % 3)])
        draws.append(rows)
    assert draws[0] == draws[1]


def test_empty_data_set_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        RowSampler(0, "standard", random.Random(0))
