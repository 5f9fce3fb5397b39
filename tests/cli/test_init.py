"""First minutes: a starter folder, schemas, the recipe reference, tab completion."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from nestling.cli.config_reference import recipe_reference
from nestling.cli.recipes import recipe_names
from nestling.config import RunConfig, load_recipe
from nestling.core.errors import ConfigError
from nestling.jobs.bounds import SMALL
from nestling.jobs.bundle import freeze

from .conftest import ROOT, Run

NEEDS_ITS_USER = ("runpod",)
"""Recipes with a key that only its user knows, such as an address."""


def test_starter_folder_runs_and_is_never_overwritten(here: Run, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    done = here("init", str(folder), "--json")
    assert done.code == 0, done.err
    assert set(done.last["files"]) == {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    }
    planned = here("run", str(folder / "recipe.toml"), "--dry-run")
    assert planned.code == 0, planned.err
    assert freeze(folder / "job").manifest().base_model in SMALL.base_models
    again = here("init", str(folder))
    assert again.code == 2
    assert "already holds" in again.err


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_valid_and_can_be_begun_with(here: Run, tmp_path: Path, name: str) -> None:
    assert here("init", str(tmp_path / name), "--recipe", name).code == 0
    ours, copied = ROOT / "recipes" / f"{name}.toml", tmp_path / name / "recipe.toml"
    if name in NEEDS_ITS_USER:
        with pytest.raises(ConfigError, match="is missing; give it"):
            load_recipe(copied)
    else:
        assert load_recipe(copied) == load_recipe(ours)


def test_unknown_recipe_names_the_known_ones(here: Run, tmp_path: Path) -> None:
    done = here("init", str(tmp_path / "x"), "--recipe", "huge")
    assert done.code == 2
    assert "quick" in done.err
    assert not (tmp_path / "x").exists()


def test_schemas_know_the_keys_that_are_enforced(here: Run) -> None:
    recipe = json.loads(here("schema", "recipe").out)
    assert set(recipe["properties"]) == set(RunConfig.model_fields)
    assert recipe["additionalProperties"] is False
    job = json.loads(here("schema", "job").out)
    assert set(job["properties"]["prime_rl"]["properties"]) == {
        key.name for key in SMALL.table("prime_rl")
    }
    example = tomllib.loads((ROOT / "examples" / "ledger" / "job.toml").read_text())
    assert set(example) <= set(job["properties"])


def test_reference_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "recipe.md").read_text("utf-8")
    assert page == recipe_reference(), "run: nestling schema recipe --markdown --out docs/recipe.md"


def test_no_key_is_without_a_meaning() -> None:
    bare = [line for line in recipe_reference().splitlines() if line.endswith("|  |")]
    assert bare == []


def test_completion_completes(process: Run) -> None:
    assert "_NESTLING_COMPLETE" in process("completion", "bash").out
    asked = {"_NESTLING_COMPLETE": "bash_complete", "COMP_WORDS": "nestling doc", "COMP_CWORD": "1"}
    assert process(environment=asked).out.split() == ["plain,doctor"]
