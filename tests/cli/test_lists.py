"""Commands that answer from what is on disk."""

import json
from pathlib import Path

import pytest

from nestling.bench.agents import read_agent
from nestling.families import bases
from nestling.families.registry import ALL, HELD_OUT, get
from nestling.store.run_store import RunStore

from .conftest import ROOT, Run


def test_families_list_has_all(here: Run) -> None:
    done = here("families", "list", "--json")
    assert done.code == 0
    found = {one["name"]: one for one in done.last["families"]}
    assert tuple(found) == ALL
    assert {name for name, one in found.items() if one["held_out"]} == set(HELD_OUT)


@pytest.mark.parametrize("name", ALL)
def test_families_show_tells_the_task(here: Run, name: str) -> None:
    done = here("families", "show", name, "--examples", "2", "--json")
    assert done.code == 0
    assert get(name).spec.strip() in done.out
    assert [bool(one["answer"]) for one in done.last["examples"]] == [True, True]


def test_models_list_verifies_weights(here: Run) -> None:
    done = here("models", "list", "--json")
    assert done.code == 0
    found = {one["name"]: one for one in done.last["models"]}
    for name in bases.names():
        assert found[name]["params"] == bases.get(name).params
        assert (found[name]["kind"], found[name]["state"]) == ("base", "verified")
    assert [one["state"] for one in found.values() if one["kind"] == "agent"] == ["complete"]


def test_models_show_prints_the_card(here: Run) -> None:
    name = bases.names()[0]
    assert f"# {name}" in here("models", "show", name).out
    done = here("models", "show", "gpt")
    assert done.code == 2
    assert name in done.err


@pytest.mark.parametrize("field", ["lr=1", "clean_lr", "clean_lr=x", "clean_lr=-1"])
def test_models_build_refuses_a_wrong_recipe(here: Run, tmp_path: Path, field: str) -> None:
    done = here("models", "build", "--work", str(tmp_path), "--out", str(tmp_path), "--set", field)
    assert done.code == 2
    assert "clean_lr" in done.err


def test_bench_list(here: Run) -> None:
    assert "spread" in here("bench", "list").out


def test_report_needs_a_run(here: Run, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        done = here("report", str(folder))
        assert done.code == 2
        assert "run" in done.err


def test_report_of_an_empty_run_is_written_where_asked(here: Run, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    RunStore(tmp_path / "run" / "run.db").close()
    page = tmp_path / "shown" / "page.html"
    done = here("report", str(tmp_path / "run"), "--out", str(page), "--json")
    assert done.code == 0, done.err
    assert page.is_file()
    assert done.last["report"] == str(page)
    assert json.loads(Path(done.last["summary"]).read_text())


@pytest.mark.long
def test_doctor_finds_this_machine_ready(here: Run) -> None:
    done = here("doctor", "--json")
    assert done.last["ok"] is (done.code == 0)
    found = {one["name"]: one for one in done.last["checks"]}
    assert {
        "Python", "packages", "torch", "GPU", "cores", "memory", "bubblewrap", "cgroup",
        "state folder", "disk of state folder", "base models", "agent",
    } <= set(found)  # fmt: skip
    for one in found.values():
        assert one["state"] in ("ok", "note", "problem")
        assert one["found"]
        assert one["fix"] or one["state"] != "problem"
    if found["bubblewrap"]["state"] == "ok":
        assert found["seccomp"]["state"] == "ok"


@pytest.mark.long
def test_doctor_names_a_state_folder_that_cannot_be_used(
    here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("NESTLING_STATE", str(tmp_path / "file" / "state"))
    done = here("doctor", "--json")
    assert done.code == 1
    found = {one["name"]: one for one in done.last["checks"]}
    assert found["state folder"]["state"] == "problem"
    assert "NESTLING_STATE" in found["state folder"]["fix"]


@pytest.mark.long
def test_doctor_names_a_secret_that_others_can_read(
    here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NESTLING_STATE", str(tmp_path))
    (tmp_path / "eval-secret").write_bytes(bytes(32))
    (tmp_path / "eval-secret").chmod(0o644)
    found = {one["name"]: one for one in here("doctor", "--json").last["checks"]}
    assert "chmod 600" in found["state folder"]["fix"]


def test_a_state_folder_that_cannot_be_made_is_a_usage_error(
    here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("NESTLING_STATE", str(tmp_path / "file" / "state"))
    for arguments in (["baselines"], ["episode", "--policy", "noop", "--family", "ledger"]):
        done = here(*arguments)
        assert done.code == 2
        assert "NESTLING_STATE" in done.err


def test_cookbook_says_that_a_cap_is_not_kept(here: Run, tmp_path: Path) -> None:
    """It ends there all the same: the extra, the tokenizer or the key is missing."""
    recipe = str(ROOT / "recipes" / "tinker.toml")
    done = here("cookbook", recipe, "--out", str(tmp_path / "run"))
    assert done.code == 2
    assert "warning: learner.max_usd=200 is not kept here" in done.err
    plain = here("cookbook", str(ROOT / "recipes" / "quick.toml"), "--out", str(tmp_path / "run"))
    assert plain.code == 2
    assert "max_usd" not in plain.err
    assert "expected tinker" in plain.err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_models_build_runs_and_goes_on(process: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ["models", "build", "--only", "nano", "--scale", "0.0003", "--out", str(out)]
    paused = process(*asked, "--deadline-s", "0.1")
    assert paused.code == 1
    assert "goes on" in paused.err
    done = process(*asked)
    assert done.code == 0, done.err
    assert bases.get("nano", out).params == bases.get("nano").params
    assert "nestling models build" in (out / "nano" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_models_build_agent_makes_a_model_folder(process: Run, tmp_path: Path) -> None:
    done = process(
        "models", "build-agent", "--episodes", "20", "--train-tokens", "2000",
        "--out", str(tmp_path / "agent"), "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.last["tokens"] >= 2000
    assert read_agent(f"embedded:{tmp_path / 'agent'}").arm.startswith("agent-")
