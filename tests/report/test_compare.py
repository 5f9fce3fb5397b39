import csv
import re
from dataclasses import replace

import pytest

from nestling.core.errors import ConfigError
from nestling.report.compare import Compared, compare_runs, differing_settings
from nestling.report.compare_page import write_comparison
from nestling.report.gather import gather
from nestling.report.page import write_report

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def two(make_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return [make_run(folder / "short", steps=1), make_run(folder / "<i>long", steps=4)]


def test_trained_agents_are_paired_by_task(two):
    _, differences = compare_runs(two)
    assert [(one.first, one.second, one.families) for one in differences] == [
        ("<i>long", "short", "training"),
        ("<i>long", "short", "held-out"),
    ]
    measured = []
    for folder in two:
        data = gather(folder)
        step = max(one.step for one in data.episodes if one.arm and one.arm.startswith("step-"))
        arm = f"step-{step:06d}"
        measured.append(
            {(one.family, one.member): one.reward for one in data.episodes if one.arm == arm}
        )
    places = [place for place in measured[0] if place[0] == "triage"]
    expected = sum(measured[1][place] - measured[0][place] for place in places) / len(places)
    held_out = differences[1].difference
    assert held_out.n == len(places) == 12
    assert held_out.mean == pytest.approx(expected)
    assert held_out.lo <= held_out.mean <= held_out.hi


def test_a_run_equals_itself_and_other_seeds_are_not_compared(two):
    runs, differences = compare_runs([two[0], two[0]])
    assert [run.label for run in runs] == ["short", "short (2)"]
    assert [one.difference.mean for one in differences] == [0.0, 0.0]
    assert differing_settings(runs) == []


def test_without_common_tasks_there_is_no_difference(two, make_run, tmp_path):
    unmeasured = make_run(tmp_path / "unmeasured", steps=1, measured=False)
    _, differences = compare_runs([two[0], unmeasured])
    assert [one.difference for one in differences] == [None, None]


def test_settings_that_differ_are_listed(two):
    data = gather(two[0])
    other = replace(data, info=replace(data.info, config={"outer": {"steps": 9, "seed": 7}}))
    runs = [Compared(label="a", data=data), Compared(label="b", data=other)]
    rows = {row.name: row.values for row in differing_settings(runs)}
    assert rows["outer.steps"] == ("1", "9")
    assert rows["outer.group_size"] == ("4", None)
    assert "outer.seed" not in rows


def test_page_stands_alone_and_its_tables_hold_the_numbers(two, tmp_path):
    page = write_comparison(two, tmp_path / "out" / "index.html", png=True)
    source = page.read_text("utf-8")
    assert "<i>long" not in source
    assert "&lt;i&gt;long" in source
    assert not re.search(r"<(script|img|link)\b", source)
    assert "on the same tasks and seeds" in source
    with (page.parent / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    head = gather(two[1]).headline
    assert float(rows[1]["final_mean"]) == pytest.approx(head.final.mean, abs=1e-5)
    assert float(rows[1]["held_out_p"]) == pytest.approx(head.held_out_gain.p_value, abs=1e-5)
    names = {path.name for path in (page.parent / "figures").iterdir()}
    for name in ("compare_reward", "compare_uplift", "compare_differences"):
        assert {f"{name}.svg", f"{name}.csv", f"{name}.png"} <= names
    png = (page.parent / "figures" / "compare_reward.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n")
    again = write_comparison(two, tmp_path / "again" / "index.html", png=True)
    assert (again.parent / "figures" / "compare_reward.png").read_bytes() == png


def test_report_writes_png_when_asked(two, tmp_path):
    page = write_report(two[0], tmp_path / "page.html", png=True)
    figures = page.parent / "figures"
    assert {one.stem for one in figures.glob("*.png")} == {
        one.stem for one in figures.glob("*.svg")
    }


def test_command_names_the_folder_that_is_no_run(two, tmp_path):
    from nestling.cli.report import command

    with pytest.raises(ConfigError, match="holds no run"):
        command.main([str(two[0]), str(tmp_path)], standalone_mode=False)
