import json
from pathlib import Path

from .conftest import ROOT, Run

DATA = str(ROOT / "results" / "calibration" / "job-response.jsonl.gz")


def test_best_job_prints_both_tables_and_writes_them(here: Run, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "best.json"
    done = here("best-job", DATA, "--families", "ledger,calc_chain", "--out", str(out), "--json")
    assert done.code == 0, done.err
    record = json.loads(out.read_text())
    assert record == done.last
    assert {"machine", "command", "commit", "figures"} <= set(record)
    assert record["figures"]["gap"]["n_families"] == 2
    assert set(record["figures"]["families"]) == {"ledger", "calc_chain"}
    page = out.with_suffix(".md").read_text()
    for text in ("| ledger |", "| base | micro; nano |", "below 0.05"):
        assert text in page
    assert "Choosing the job by family" in done.out


def test_best_job_wants_data(here: Run, tmp_path: Path) -> None:
    assert here("best-job").code == 2
    assert here("best-job", str(tmp_path / "none.json")).code == 2
    other = tmp_path / "other.json"
    other.write_text("{}")
    done = here("best-job", str(other))
    assert done.code == 2
    assert "bench spread" in done.err
