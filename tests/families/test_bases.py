import json
import math
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError, ModelError
from nestling.engine.checkpoint import load_model
from nestling.engine.weights import num_parameters
from nestling.families import bases
from nestling.families.base_card import wilson
from nestling.families.base_recipe import RECIPES, BaseRecipe, recipe
from nestling.families.build_bases import BuildConfig, build
from nestling.families.calibration import Point, miss, next_noise
from nestling.families.corpus import generate
from nestling.families.registry import ALL
from nestling.families.vocabulary import tokenizer

TINY = BaseRecipe(
    name="tiny",
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    intermediate_size=16,
    targets={"ledger": 0.3, "multi_hop": 0.4},
    clean_tokens=800,
    clean_batch_episodes=4,
    clean_warmup_steps=2,
    noisy_steps=3,
    noisy_batch_episodes=4,
    noisy_episodes=10,
    sweep=(0.0, 2.0),
    refits=((0.9, 1.1),),
    sweep_items=1,
    refit_items=1,
    final_items=1,
)


class SteppingClock:
    """A clock that advances by one second whenever it is read."""

    def __init__(self) -> None:
        self._ticks = count()

    def now(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        return float(next(self._ticks))


def quiet(entry: dict[str, Any]) -> None:
    json.dumps(entry)


@pytest.mark.long
def test_a_stopped_build_ends_in_the_same_model(tmp_path: Path) -> None:
    whole = BuildConfig(out=tmp_path / "whole", work=tmp_path / "w1")
    assert build(whole, TINY, quiet, SystemClock()) == "done"

    pieces = BuildConfig(out=tmp_path / "pieces", work=tmp_path / "w2", deadline_s=14)
    results = [build(pieces, TINY, quiet, SteppingClock())]
    while results[-1] == "paused":
        assert len(results) < 60
        results.append(build(pieces, TINY, quiet, SteppingClock()))
    assert len(results) >= 3

    ours, theirs = (bases.get("tiny", config.out) for config in (whole, pieces))
    assert ours.sha256 == theirs.sha256
    ours.verify()
    model = load_model(ours.folder)
    assert num_parameters(model.config) == ours.params
    card = (ours.folder / "README.md").read_text()
    for phrase in ("95 % interval", "ledger", "multi_hop", "Apache-2.0", "nestling models build"):
        assert phrase in card
    assert build(whole, TINY, quiet, SystemClock()) == "done"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_stacking_gives_the_same_model_up_to_rounding(tmp_path: Path) -> None:
    found = []
    for stack in (1, 2):
        config = BuildConfig(out=tmp_path / f"o{stack}", work=tmp_path / f"w{stack}", stack=stack)
        build(config, TINY, quiet, SystemClock())
        path = tmp_path / f"w{stack}" / "tiny" / "sweep_1" / "done.json"
        found.append(json.loads(path.read_text()))
    assert found[0]["noise"] == found[1]["noise"]
    assert math.isclose(found[0]["loss"], found[1]["loss"], rel_tol=1e-3)


@pytest.mark.long
def test_a_rarely_practised_family_gets_no_noise(tmp_path: Path) -> None:
    config = BuildConfig(out=tmp_path / "out", work=tmp_path / "work")
    limited = TINY.model_copy(update={"shares": {"multi_hop": 0.2}})
    build(config, limited, quiet, SystemClock())
    made = list((tmp_path / "work" / "tiny").glob("*_[0-9]/done.json"))
    noise = [json.loads(path.read_text())["noise"] for path in made]
    assert len(noise) == 4
    assert {one["multi_hop"] for one in noise} == {0.0}
    assert {one["ledger"] for one in noise} >= {0.0, 2.0}
    final = json.loads((tmp_path / "work" / "tiny" / "final.json").read_text())
    assert final["miss"] == miss(final["scores"], {"ledger": 0.3}), "its score is no miss"
    card = (tmp_path / "out" / "tiny" / "README.md").read_text()
    assert "skill itself is limited: multi_hop." in card
    assert "at most 0.40" in card


def test_a_work_folder_belongs_to_one_recipe(tmp_path: Path) -> None:
    config = BuildConfig(out=tmp_path / "out", work=tmp_path / "work", deadline_s=1)
    assert build(config, TINY, quiet, SteppingClock()) == "paused"
    with pytest.raises(ConfigError, match="another recipe"):
        build(config, TINY.model_copy(update={"seed": 1}), quiet, SystemClock())


def test_an_absent_or_changed_model_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nestling models build"):
        bases.get("nano", tmp_path)
    for name, content in (("nano", b"a"), ("micro", b"bb")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
        bases.write_catalog(tmp_path, name, params=len(content), licence="Apache-2.0")
    assert bases.names(tmp_path) == ("nano", "micro")
    model = bases.get("nano", tmp_path)
    model.verify()
    (tmp_path / "nano" / "model.safetensors").write_bytes(b"c")
    with pytest.raises(ModelError, match="SHA-256"):
        model.verify()
    (tmp_path / "nano" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        bases.get("nano", tmp_path)
    with pytest.raises(ModelError, match="expected one of micro, nano"):
        bases.get("mega", tmp_path)
    (tmp_path / "catalog.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot read"):
        bases.names(tmp_path)


def test_micro_is_better_everywhere_but_in_multi_hop() -> None:
    nano, micro = recipe("nano"), recipe("micro")
    assert {name for name in ALL if nano.targets[name] > micro.targets[name]} == {"multi_hop"}
    assert set(nano.targets) == set(micro.targets) == set(ALL)
    assert (nano.limited, micro.limited) == (frozenset(), {"multi_hop"})
    sizes = [num_parameters(one.model_config_of()) for one in RECIPES]
    assert 0.3e6 < sizes[0] < 0.45e6
    assert 1.4e6 < sizes[1] < 1.8e6
    with pytest.raises(ConfigError, match="no recipe"):
        recipe("mega")


def test_the_fit_finds_the_noise_of_an_exponential() -> None:
    points = [Point(z=z, score=0.95 * math.exp(-0.6 * z), n=400) for z in (0.0, 0.5, 1, 2, 3.2, 5)]
    for target in (0.2, 0.35, 0.55, 0.74):
        z = next_noise(points, target)
        assert math.isclose(0.95 * math.exp(-0.6 * z), target, rel_tol=0.05)


def test_the_fit_survives_flat_and_hopeless_points() -> None:
    assert next_noise([Point(z=z, score=0.0, n=10) for z in (0.0, 1.0)], 0.5) == 0.0
    assert 0 <= next_noise([Point(z=1.0, score=0.5, n=10)], 0.5) <= 10
    assert next_noise([Point(z=z, score=1.0, n=10) for z in (0.0, 1.0)], 0.5) >= 0


def test_miss_and_interval_are_what_they_say() -> None:
    assert miss({"a": 0.5}, {"a": 0.5}) == 0
    assert miss({"a": 0.5, "b": 0.1}, {"a": 0.5, "b": 0.2}) > 0.2
    low, high = wilson(0.5, 400)
    assert low < 0.5 < high
    assert math.isclose(high - low, 0.098, abs_tol=0.002)
    assert wilson(0.0, 10)[0] == 0.0


def test_shares_say_how_often_a_family_is_drawn() -> None:
    noise = {"ledger": 0.0, "multi_hop": 0.0}
    even = generate(noise, 400, 3)
    assert (generate(noise, 400, 3, shares={"ledger": 1.0}).ids == even.ids).all()
    rare = generate(noise, 400, 3, shares={"multi_hop": 0.05})
    words = tokenizer()
    hops = ["who is" in words.decode(rare.episode(index)[0]) for index in range(400)]
    assert 5 <= sum(hops) <= 40
