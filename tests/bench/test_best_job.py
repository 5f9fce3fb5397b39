"""The best fixed job against the best job of each family."""

import gzip
import json
import random
from pathlib import Path
from statistics import fmean

import pytest

from nestling.bench.best_job import measure, summarise, verdict
from nestling.bench.response_data import Job, Trial, read_trials
from nestling.core.errors import ConfigError
from nestling.families.registry import TRAINING

ROOT = Path(__file__).parents[2]
DATA = ROOT / "results" / "calibration" / "job-response.jsonl.gz"
SPREAD = ROOT / "results" / "bench" / "spread.json"
FAMILIES = ("calc_chain", "ledger", "dispatch", "multi_hop")
LINE = {
    "fam": "ledger", "base": "micro", "rub": "exact", "span": None,
    "set": {"lr": 0.0003, "max_steps": 10, "batch_size": 64}, "seed": 0, "status": "succeeded",
    "reason": "", "detail": "", "pre": 0.2, "best": 0.2, "post": 0.8, "up": 0.6, "ci": [0.5, 0.7],
    "cpu": 1.0, "wall": 1.0, "rew": [0.5], "gr": [8],
}  # fmt: skip


def job(**choices: str) -> Job:
    usual = {
        "base": "micro", "data": "eval", "rubric": "exact", "size": "10 x 64", "group_size": "8",
        "temperature": "1", "update": "lr 0.0003",
    }  # fmt: skip
    return Job(**(usual | choices))


def trials(worth: dict[tuple[str, Job], float], *, seeds: int, sd: float) -> list[Trial]:
    rng = random.Random(5)
    return [
        Trial(family=family, jobs=(one,), seed=seed, reward=mean + rng.gauss(0, sd))
        for (family, one), mean in worth.items()
        for seed in range(seeds)
    ]


def written(path: Path, *changes: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(LINE | change) + "\n" for change in changes))
    return path


@pytest.mark.parametrize(("seeds", "split"), [(2, "seeds"), (1, "noise")])
def test_luck_alone_gives_a_gap_only_on_the_data_it_was_chosen_by(seeds: int, split: str) -> None:
    jobs = [job(update=f"lr {place}") for place in range(30)]
    found = trials(
        {(family, one): 0.8 for family in FAMILIES for one in jobs}, seeds=seeds, sd=0.03
    )
    if split == "noise":
        found += [one.model_copy(update={"seed": 1}) for one in _again(found, sd=0.03)]
    figures = summarise(found, FAMILIES)
    assert figures["split"] == split
    assert figures["noise_sd"] == pytest.approx(0.03, rel=0.5)
    assert figures["gap"]["flattered"] > 0.02
    assert abs(figures["gap"]["cross_fitted"]) < 0.02
    assert not figures["is_target_reached"]
    assert figures["choices"]["update"]["depends"] is False
    assert "below 0.05" in verdict(figures)


def _again(found: list[Trial], sd: float) -> list[Trial]:
    """Second seeds for the jobs of one family."""
    rng = random.Random(6)
    return [
        one.model_copy(update={"reward": 0.8 + rng.gauss(0, sd)})
        for one in found
        if one.family == FAMILIES[0]
    ]


def test_a_choice_that_depends_on_the_family_is_found() -> None:
    nano_is_better = FAMILIES[:2]
    worth = {
        (family, job(base=base, rubric=rubric)): 0.5
        + 0.3 * ((base == "nano") == (family in nano_is_better))
        + 0.1 * (rubric == "exact")
        for family in FAMILIES
        for base in ("nano", "micro")
        for rubric in ("exact", "lenient")
    }
    figures = summarise(trials(worth, seeds=3, sd=0.01), FAMILIES)
    assert figures["gap"]["cross_fitted"] == pytest.approx(0.15, abs=0.02)
    assert figures["is_target_reached"]
    base, rubric = figures["choices"]["base"], figures["choices"]["rubric"]
    assert base["best"] == {
        family: "nano" if family in nano_is_better else "micro" for family in FAMILIES
    }
    assert base["depends"] is True
    assert base["gap"]["ci_over_seeds"][0] > 0.1
    assert (rubric["fixed"], rubric["depends"]) == ("exact", False)
    assert figures["choices"]["size"]["depends"] is None, "it was never varied"


def test_a_choice_that_pays_in_one_family_alone_is_shown_by_seeds() -> None:
    odd = FAMILIES[0]
    worth = {
        (family, job(base=base)): 0.5 + 0.4 * ((base == "nano") == (family == odd))
        for family in FAMILIES
        for base in ("nano", "micro")
    }
    figures = summarise(trials(worth, seeds=3, sd=0.01), FAMILIES)
    gap = figures["choices"]["base"]["gap"]
    assert gap["ci"][0] < 0, "other families may be like the rest"
    assert gap["ci_over_seeds"][0] > 0.05
    assert figures["choices"]["base"]["depends"] is True
    assert "over 3 training seeds" in verdict(figures)


def test_one_family_tells_nothing_about_others() -> None:
    worth = {("ledger", job(base=base)): 0.5 for base in ("nano", "micro")}
    figures = summarise(trials(worth, seeds=2, sd=0.01), ["ledger"])
    assert figures["gap"]["flattered"] == 0.0
    assert figures["gap"]["ci"] is None


def test_jobs_are_paid_by_what_became_of_them(tmp_path: Path) -> None:
    path = written(
        tmp_path / "data.jsonl",
        {},
        {"status": "failed", "reason": "train.diverged", "post": None, "up": None, "ci": None, "seed": 1},
        {"rub": "format", "seed": 2},
        {"span": [1, 2]},
        {},
    )  # fmt: skip
    found = read_trials([path], "seed")
    quality = 0.25 * 0.8 + 0.75 * 0.6 / 0.8
    assert [one.reward for one in found] == pytest.approx(
        [0.35 + 0.60 * quality + 0.05 * 0.375, 0.35, 0.0, found[0].reward]
    )
    assert [name.data for name in found[0].jobs] == ["eval", "2..5"]
    assert [name.data for name in found[3].jobs] == ["1..2"]
    paired = read_trials([path], "paired")
    assert paired[0].reward == pytest.approx(0.35 + 0.60 * 0.5 / 0.8 + 0.05 * 0.375)


def test_names_of_equal_jobs_are_equal_in_both_kinds_of_data() -> None:
    response, spread = (read_trials([path], "seed") for path in (DATA, SPREAD))
    # nano is the same model in both; micro was built again between them.
    name, family = job(base="nano"), "multi_hop"
    rewards = [
        fmean(one.reward for one in found if one.family == family and name in one.jobs)
        for found in (response, spread)
    ]
    assert rewards[0] == pytest.approx(rewards[1], abs=0.02)
    seeds = {one.seed for one in spread if one.family == family and name in one.jobs}
    assert seeds == {0, 1, 2}
    with pytest.raises(ConfigError, match="no interval"):
        read_trials([SPREAD], "paired")


def test_settings_that_a_record_kept_come_before_those_of_its_name(tmp_path: Path) -> None:
    kept = json.loads(SPREAD.read_text())
    rows = [row for row in kept["runs"] if (row["family"], row["job"]) == ("ledger", "template")]
    rows[0]["settings"] = {"lr": 1e-5, "max_steps": 4, "batch_size": 32}
    path = tmp_path / "spread.json"
    path.write_text(json.dumps(kept | {"runs": rows}))
    (name,) = {one.jobs[0] for one in read_trials([path], "seed")}
    assert (name.update, name.size) == ("lr 1e-05", "4 x 32")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "cannot be read"),
        ("a.jsonl", '{"fam": "ledger"}', "cannot be read"),
        ("a.json", '{"name": "engine", "runs": []}', "bench spread"),
        ("a.jsonl.gz", "not gzip", "cannot be read"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trials([path], "seed")


def test_data_of_different_bases_is_not_mixed(tmp_path: Path) -> None:
    one = written(tmp_path / "a.jsonl", {})
    other = written(tmp_path / "b.jsonl", {"best": 0.3})
    with pytest.raises(ConfigError, match="same bases and hidden items"):
        read_trials([one, other], "seed")


def test_too_little_data_says_what_is_missing(tmp_path: Path) -> None:
    single = written(tmp_path / "a.jsonl", {})
    with pytest.raises(ConfigError, match="two seeds"):
        measure([single], families=["ledger"])
    with pytest.raises(ConfigError, match="no job of dispatch"):
        measure([written(tmp_path / "b.jsonl", {}, {"seed": 1})], families=["ledger", "dispatch"])
    apart = written(tmp_path / "c.jsonl", {}, {"seed": 1}, {"fam": "calc_chain", "base": "nano"})
    with pytest.raises(ConfigError, match="no job was measured on all"):
        measure([apart], families=["ledger", "calc_chain"])


@pytest.mark.parametrize("name", ["best-job", "best-job-one-change", "best-job-spread"])
def test_committed_figures_are_those_of_the_committed_data(name: str) -> None:
    kept = json.loads((ROOT / "results" / "calibration" / f"{name}.json").read_text())
    asked = kept["settings"]
    again = measure(
        [ROOT / path for path in asked["data"]],
        families=asked["families"],
        kind=asked["reward"],
        seed=asked["seed"],
    )
    assert again.figures == _approximately(kept["figures"])
    assert kept["figures"]["is_target_reached"] is (kept["figures"]["gap"]["cross_fitted"] >= 0.05)


def _approximately(value: object) -> object:
    if isinstance(value, dict):
        return {key: _approximately(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_approximately(one) for one in value]
    return pytest.approx(value, abs=1e-6) if isinstance(value, float) else value


def test_every_training_family_is_in_the_committed_data() -> None:
    lines = gzip.decompress(DATA.read_bytes()).decode().splitlines()
    assert {json.loads(line)["fam"] for line in lines} >= set(TRAINING)
