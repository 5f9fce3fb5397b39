import gzip
import json

import pytest
from click.testing import CliRunner

from nestling.cli.report import command
from nestling.core.errors import ConfigError, StoreError
from nestling.report.arc_data import is_arc_data, write_arc_data
from nestling.report.compare import compare_runs
from nestling.report.gather import gather, read_records
from nestling.report.page import write_report


@pytest.fixture(scope="module")
def exported(run_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "data"
    result = CliRunner().invoke(command, [str(run_folder), "--export", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout.splitlines()[-1])["files"]) == 5
    return folder


def test_an_export_says_all_that_the_run_says(run_folder, exported):
    assert is_arc_data(exported)
    assert not is_arc_data(run_folder)
    assert read_records(exported) == read_records(run_folder)
    assert gather(exported) == gather(run_folder)


def test_the_same_run_gives_the_same_bytes(run_folder, exported, tmp_path):
    for file in write_arc_data(read_records(run_folder), tmp_path / "again"):
        assert file.read_bytes() == (exported / file.name).read_bytes()


@pytest.mark.long
def test_a_report_of_an_export_has_the_same_figures_and_tables(run_folder, exported, tmp_path):
    pages = [write_report(one, tmp_path / one.name / "page.html") for one in (run_folder, exported)]
    names = {path.relative_to(pages[0].parent) for path in pages[0].parent.rglob("*.*")}
    assert names == {path.relative_to(pages[1].parent) for path in pages[1].parent.rglob("*.*")}
    for name in names:
        if name.suffix != ".html":
            first, second = ((page.parent / name).read_bytes() for page in pages)
            assert first == second, name
    assert "exported data, which holds no text" in pages[1].read_text(encoding="utf-8")


def test_an_export_and_its_run_are_compared_as_equals(run_folder, exported):
    _, differences = compare_runs([run_folder, exported])
    assert [one.difference.mean for one in differences] == [0.0, 0.0]


@pytest.mark.long
def test_hostile_text_survives(make_run, hostile, tmp_path):
    run = make_run(tmp_path / "run", steps=1, text=hostile)
    write_arc_data(read_records(run), tmp_path / "data")
    assert gather(tmp_path / "data") == gather(run)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", b"{"),
        ("run.json", None),
        ("episodes.jsonl.gz", b"not gzip"),
        ("episodes.jsonl.gz", gzip.compress(b'{"id": 3}\n', mtime=0)),
        ("jobs.jsonl.gz", gzip.compress(b"{}\n", mtime=0)[:-9]),
        ("sweeps.jsonl.gz", None),
    ],
)
def test_damaged_files_are_named(exported, tmp_path, name, content):
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in exported.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(StoreError, match=name if name != "run.json" or content else "run"):
        read_records(folder)


def test_a_later_format_is_refused(exported, tmp_path):
    folder = tmp_path / "later"
    folder.mkdir()
    for file in exported.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    head = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**head, "format": 2}))
    with pytest.raises(StoreError, match="format 2"):
        read_records(folder)


def test_only_one_run_can_be_exported(run_folder, tmp_path):
    arguments = [str(run_folder), str(run_folder), "--export", str(tmp_path / "two")]
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, ConfigError)
    assert "one run" in str(result.exception)
