"""Hidden set C: only `eval-agent --sealed` reaches it, once, and every figure says so."""

import json
from pathlib import Path

import pytest

from nestling.bench.compare import default_folder
from nestling.config import InnerConfig, RunConfig, load_recipe, recipe_toml
from nestling.core.errors import ConfigError
from nestling.families.splits import EvalSecret, commitment
from nestling.wiring.fleets import result_identity
from nestling.wiring.sealed import Opening, SealedSet

from .conftest import EXAMPLES, Run

TINY = ("--set", "inner.eval_items=8", "--set", "inner.leak_items=16", "--set", "fleet.workers=1")
SEALED = RunConfig(inner=InnerConfig(split="c"))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder that nothing was opened in."""
    folder = tmp_path / "state"
    folder.mkdir()
    monkeypatch.setenv("NESTLING_STATE", str(folder))
    return folder


def opening(**changes: object) -> Opening:
    return Opening(
        at="2026-01-02T03:04:05+00:00", commitment="c0ffee", agents=("noop", "embedded"),
        arms=("hatchling-1", "noop"), families=("ledger",), episodes=4, seed=0, settings="5e77",
        folder="runs/sealed", commit=None,
    ).model_copy(update=changes)  # fmt: skip


def test_the_same_sweep_continues_and_counts_once(state: Path) -> None:
    first = SealedSet(state).open(opening())
    later = opening(at="2026-02-03T00:00:00+00:00", agents=("embedded:other-name", "noop"))
    again = SealedSet(state).open(later)
    assert again == first == SealedSet(state).opened(later)
    assert (first.before, first.total) == (0, 1)
    assert "opened once" in first.told()


@pytest.mark.parametrize(
    "change",
    [
        {"arms": ("hatchling-2", "noop")}, {"families": ("triage",)}, {"episodes": 5}, {"seed": 1},
        {"settings": "07e3"}, {"folder": "runs/other"},
    ],
)  # fmt: skip
def test_another_sweep_is_refused_with_when_and_what_for(
    state: Path, change: dict[str, object]
) -> None:
    sealed = SealedSet(state)
    sealed.open(opening())
    for attempt in (sealed.check, sealed.open):
        with pytest.raises(ConfigError, match=r"opened 2026-01-02T03:04:05\+00:00 for noop, emb"):
            attempt(opening(**change))
    found = sealed.open(opening(**change), again=True)
    assert (found.before, found.total) == (1, 2)
    assert "opened 2 times; this is opening 2" in found.told()
    assert sealed.open(opening(**change)) == found, "it continues like any other"
    assert sealed.opened(opening()).total == 2, "the first one says so too"


def test_another_secret_has_a_set_of_its_own(state: Path) -> None:
    SealedSet(state).open(opening())
    assert SealedSet(state).open(opening(commitment="decade", seed=3)).total == 1


def test_a_damaged_record_is_not_an_unopened_set(state: Path) -> None:
    (state / "sealed-openings.json").write_text("[")
    with pytest.raises(ConfigError, match="sealed-openings"):
        SealedSet(state).open(opening())


@pytest.mark.parametrize("command", ["run", "eval-agent", "baselines", "job", "episode"])
def test_no_setting_reaches_the_sealed_set(here: Run, state: Path, command: str) -> None:
    rest = {
        "run": ["--dry-run"], "eval-agent": ["--agents", "noop"], "baselines": [],
        "job": ["run", str(EXAMPLES / "ledger")],
        "episode": ["--policy", "noop", "--family", "ledger"],
    }  # fmt: skip
    done = here(command, *rest[command], "--set", "inner.split=c")
    assert done.code == 2
    assert "inner.split" in done.err
    assert not (state / "sealed-openings.json").exists()


def test_a_recipe_that_names_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_toml(SEALED))
    with pytest.raises(ConfigError, match="--sealed"):
        load_recipe(path)
    assert load_recipe(path, sealed=True) == SEALED


def test_again_alone_is_refused(here: Run) -> None:
    done = here("eval-agent", "--agents", "noop", "--sealed-again")
    assert done.code == 2
    assert "add --sealed" in done.err


def test_results_of_the_two_sets_have_different_keys() -> None:
    plain = result_identity(RunConfig())
    assert "split" not in plain, "results of set B keep the keys they have"
    assert result_identity(SEALED) == {**plain, "split": "c"}
    assert default_folder(RunConfig()).name.startswith("eval-")
    assert default_folder(SEALED).name.startswith("sealed-")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_set_c_pays_every_arm_and_b_stays_as_it_was(
    process: Run, tmp_path: Path, state: Path
) -> None:
    out = tmp_path / "c.json"
    asked = ["eval-agent", "--families", "ledger", "-n", "1", "--json", *TINY]
    agents = ["--agents", "noop,template"]
    before = process(*asked, *agents, "--folder", "b")
    assert before.code == 0, before.err
    assert before.last["split"] == "b"
    sealed = process(*asked, *agents, "--sealed", "--out", str(out))
    assert sealed.code == 0, sealed.err
    found = json.loads(out.read_text())
    assert found == sealed.last
    secret = EvalSecret.load_or_create(state / "eval-secret")
    assert (found["split"], found["commitment"]) == ("c", commitment(secret, "c"))
    assert (found["opened_before"], found["opened"]) == (0, 1)
    assert "opened once" in sealed.err
    folder = tmp_path / found["folder"]
    assert folder.name.startswith("sealed-")
    assert "opened once" in (folder / "agents.html").read_text()

    kept = [json.loads(path.read_bytes()) for path in (state / "baselines").glob("*.json")]
    scores = {(one["split"], one["base"]): sum(one["correct"]) / one["n"] for one in kept}
    assert {split for split, _ in scores} == {"a", "b", "c"}
    bases = {base for _, base in scores}
    assert found["best_pre"] == {"ledger": max(scores["c", base] for base in bases)}
    assert found["baselines_a"] == {"ledger": {base: scores["a", base] for base in bases}}

    same = process(*asked, *agents, "--sealed")
    assert same.last == sealed.last
    assert "job_" not in same.err, "nothing is played twice"
    other = process(*asked, "--agents", "noop", "--sealed")
    assert other.code == 2
    assert found["opened_at"] in other.err
    assert "noop, template on ledger" in other.err
    mixed = process(*asked, *agents, "--folder", str(folder))
    assert mixed.code == 2
    assert "other settings" in mixed.err
    again = process(*asked, "--agents", "noop", "--sealed", "--sealed-again", "--folder", "c2")
    assert (again.last["opened_before"], again.last["opened"]) == (1, 2)
    assert "opened 2 times" in again.err
    after = process(*asked, *agents, "--folder", "b-again")
    assert after.last["arms"] == before.last["arms"]
