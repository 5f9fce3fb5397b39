"""What `nestling run` refuses before anything starts; `tests/e2e` has whole runs."""

from pathlib import Path

import pytest

from .conftest import ROOT, Run

QUICK = str(ROOT / "recipes" / "quick.toml")


def test_another_recipe_in_the_same_folder_is_refused(here: Run, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('name = "other"\n')
    done = here("run", QUICK, "--out", str(tmp_path), "--json")
    assert done.code == 2
    assert "another recipe" in done.err
    assert (tmp_path / "config.toml").read_text() == 'name = "other"\n'


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("outer.stepz=3", "did you mean steps?"),
        ("outer.steps=0", "outer.steps"),
        ("agent.model=nobody", "no agent 'nobody'"),
        ("fleet.machine=moon", "has no price"),
        ("families.training=['legder']", "legder"),
        ("steps", "expected a.b=value"),
    ],
)
def test_a_wrong_setting_says_what_and_how(
    here: Run, tmp_path: Path, setting: str, message: str
) -> None:
    done = here("run", QUICK, "--out", str(tmp_path / "run"), "--json", "--set", setting)
    assert done.code == 2, done.err
    assert message in done.err
    assert "Traceback" not in done.err
