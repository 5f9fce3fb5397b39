"""The ablation of a real record."""

import json
from pathlib import Path

import pytest

from .conftest import Run

TINY = ("--set", "inner.eval_items=8", "--set", "inner.leak_items=16", "--set", "fleet.workers=1")


def test_ablation_wants_a_run(here: Run, tmp_path: Path) -> None:
    assert here("ablate").code == 2
    assert here("ablate", str(tmp_path / "none")).code == 2
    done = here("ablate", str(tmp_path))
    assert done.code == 2
    assert "config.toml" in done.err
    done = here("ablate", str(tmp_path), "--parts", "base,reward")
    assert done.code == 2
    assert "rubric" in done.err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_arm_of_a_record_is_ablated(process: Run, tmp_path: Path) -> None:
    record = tmp_path / "record"
    played = process(
        "eval-agent", "--agents", "noop", "--families", "ledger", "-n", "1", "--folder", str(record),
        *TINY, timeout_s=800,
    )  # fmt: skip
    assert played.code == 0, played.err
    done = process("ablate", str(record), "--arm", "noop", "--parts", "rubric,data", "--json",
                   timeout_s=800)  # fmt: skip
    assert done.code == 0, done.err
    file = record / "ablation" / "ablation.json"
    assert json.loads(file.read_text()) == done.last
    assert {"machine", "command", "commit", "settings"} <= set(done.last)
    assert done.last["settings"]["items"] == 8, "the recipe of the record"
    for part in ("rubric", "data"):
        found = done.last["figures"]["ledger"][part]
        assert (found["jobs"], found["alike"], found["n"], found["earned"]) == (1, 1, 1, 0.0)
    page = file.with_suffix(".md").read_text()
    assert "arm noop" in page
    assert "| rubric | ledger | 1 | 1 |" in page
    wrong = process("ablate", str(record), "--arm", "nope")
    assert wrong.code == 2
    assert "noop" in wrong.err
