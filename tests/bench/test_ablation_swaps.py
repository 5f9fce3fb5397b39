"""What parts earned, from rewards of pairs."""

import pytest

from nestling.agent.reward import RewardWeights, Terms
from nestling.bench.ablation.swaps import Swap, figures_of, rows_of

WEIGHTS = RewardWeights()


def terms(quality: float, speed: float = 0.5) -> Terms:
    total = WEIGHTS.validation + WEIGHTS.quality * quality + WEIGHTS.speed * speed
    return Terms(kind="seed", validation=1.0, quality=quality, speed=speed, total=total)


def swap(place: int, *, quality: float = 0.0, other: float = 0.0, **facts: object) -> Swap:
    usual: dict[str, object] = {
        "episode_id": f"e{place}", "task": f"t{place}", "family": "ledger", "part": "base",
        "job_hash": f"j{place}", "swapped_hash": f"s{place}", "own": (terms(quality, 0.1),),
        "swapped": (terms(other),),
    }  # fmt: skip
    return Swap.model_validate(usual | facts)


def test_a_part_earns_the_paired_difference_and_its_terms_add_up() -> None:
    swaps = [swap(place, quality=0.5 + 0.1 * place, other=0.2) for place in range(4)]
    found = figures_of(swaps, WEIGHTS)["all"]["base"]
    assert found["earned"] == pytest.approx(0.6 * 0.45 - 0.05 * 0.4)
    assert sum(found["terms"].values()) == pytest.approx(found["earned"])
    assert found["reward"] - found["reward_swapped"] == pytest.approx(found["earned"])
    assert found["ci"][0] < found["earned"] < found["ci"][1]
    assert (found["n"], found["clusters"], found["not_runnable"]) == (4, 4, {})


def test_seeds_are_averaged_within_a_pair() -> None:
    one = swap(0, own=(terms(0.5), terms(0.7)), swapped=(terms(0.1), terms(0.3)))
    assert one.earned("quality") == pytest.approx(0.4)
    assert figures_of([one], WEIGHTS)["all"]["base"]["ci"] is None, "one pair has no spread"


def test_pairs_of_one_task_or_of_equal_jobs_are_one_cluster() -> None:
    swaps = [
        swap(0, task="a", job_hash="x"),
        swap(1, task="a", job_hash="y"),
        swap(2, task="b", job_hash="y"),
        swap(3, task="c", job_hash="z"),
        swap(4, task="d", job_hash="x", family="dispatch"),
    ]
    figures = figures_of(swaps, WEIGHTS)
    assert figures["all"]["base"]["clusters"] == 3
    assert figures["ledger"]["base"]["clusters"] == 2
    assert figures["dispatch"]["base"]["clusters"] == 1


def test_what_could_not_be_run_is_counted_and_left_out() -> None:
    empty: dict[str, object] = {"own": (), "swapped": ()}
    swaps = [
        swap(0, quality=0.5, other=0.5, swapped_hash="j0"),
        swap(1, quality=0.5, other=0.1, died=1),
        swap(2, not_runnable="rubric.error", **empty),
        swap(3, not_runnable="rubric.error", **empty),
        swap(4, not_runnable="ablation.inseparable", swapped_hash=None, **empty),
        swap(5, part="data", not_runnable="ablation.inseparable", swapped_hash=None, **empty),
    ]
    figures = figures_of(swaps, WEIGHTS)
    base, data = figures["all"]["base"], figures["all"]["data"]
    assert base["not_runnable"] == {"rubric.error": 2, "ablation.inseparable": 1}
    assert (base["jobs"], base["n"], base["alike"], base["died"]) == (5, 2, 1, 1)
    assert base["earned"] == pytest.approx((0 - 0.02 + 0.24 - 0.02) / 2)
    assert (data["n"], data["earned"], data["ci"], data["reward"]) == (0, None, None, None)
    rows = rows_of(figures)
    assert [row[:2] for row in rows] == [("base", "ledger"), ("data", "ledger")]
    assert "2 rubric.error, 1 ablation.inseparable" in rows[0]
    assert rows[1].count("-") == 6


def test_families_are_told_apart_below_the_pooled_rows() -> None:
    rows = rows_of(figures_of([swap(0), swap(1, family="dispatch")], WEIGHTS))
    assert [row[1] for row in rows] == ["all", "ledger", "dispatch"]
