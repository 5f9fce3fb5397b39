import csv
import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from nestling.cli.report import command
from nestling.config import load_recipe
from nestling.core.errors import ConfigError, StoreError
from nestling.families.registry import TRAINING
from nestling.report.arc_data import write_arc_data
from nestling.report.gather import gather, read_records
from nestling.report.paired import by_task, paired_gain
from nestling.report.published import redraw
from nestling.report.published.plan import read_plan
from nestling.report.published.quantities import QUANTITIES, Evidence

pytestmark = pytest.mark.long

RESULTS = Path(__file__).parents[2] / "results"
KEPT = (
    "arc/arcs.toml", "pilots", "quick", "laptop", "bench", "agents", "calibration", "open-model",
)  # fmt: skip


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """The repository's results without an arc's data, redrawn."""
    folder = tmp_path_factory.mktemp("results") / "results"
    for name in KEPT:
        if (RESULTS / name).is_dir():
            shutil.copytree(RESULTS / name, folder / name)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(RESULTS / name, folder / name)
    redraw(folder)
    return folder


@pytest.fixture(scope="module")
def full(empty, run_folder, tmp_path_factory):
    """The same with two seeds of an arc and a measurement made apart."""
    folder = tmp_path_factory.mktemp("with-arcs") / "results"
    shutil.copytree(empty, folder)
    records = read_records(run_folder)
    for name in ("main/run", "cpu-1/run", "main/sweep"):
        write_arc_data(records, folder / "arc" / name)
    write_arc_data(replace(records, steps=()), folder / "arc" / "leave-out-ledger" / "run")
    result = CliRunner().invoke(command, [str(folder), "--redraw", "--json"])
    assert result.exit_code == 0, result.output
    return folder


def rows_of(page, heading):
    """First cells to all cells of the first table below a heading."""
    section = page.read_text("utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return {line[0]: line for line in lines[2:]}


def test_the_committed_page_is_what_the_committed_data_gives(empty):
    """Tables to the byte; pictures may differ by the version of the drawing library."""
    for table in empty.rglob("figures/*.csv"):
        committed = RESULTS / table.relative_to(empty)
        assert committed.read_bytes() == table.read_bytes(), f"{committed}: run `make figures`"
    if not any((RESULTS / "arc").glob("*/run")):
        committed = RESULTS / "README.md"
        assert committed.read_bytes() == (empty / "README.md").read_bytes(), "run `make figures`"


def test_without_data_nothing_is_claimed(empty):
    rows = rows_of(empty / "README.md", "The published arc and ours")
    assert rows["reward, best window (flatters)"][1] == "0.63 (peak)"
    for row in rows.values():
        assert set(row[2:]) == {"not yet run"}
    text = (empty / "README.md").read_text("utf-8")
    for one in read_plan(RESULTS / "arc" / "arcs.toml").arcs:
        assert f"- {one.title}: `nestling run {one.recipe}`" in text
    assert not (empty / "summary.json").exists()


def test_every_link_of_the_page_leads_to_a_file(empty, full):
    for folder in (empty, full):
        text = (folder / "README.md").read_text("utf-8")
        links = re.findall(r"\]\(([^)]+)\)", text)
        assert links
        missing = [
            link for link in links if not (folder / link).exists() and not (RESULTS / link).exists()
        ]
        assert missing == []


def test_an_arc_is_shown_with_n_and_intervals(full, run_folder):
    data = gather(run_folder)
    rows = rows_of(full / "README.md", "The published arc and ours")
    last = data.headline.final
    shown = f"{last.mean:.3f} [{last.lo:.3f}, {last.hi:.3f}], n = {last.n}"
    assert rows["reward, last"][2:] == [shown, shown, "not yet run"]
    assert rows["outer steps × episodes"][2] == "4 × 16"
    over = paired_gain(
        by_task(data.episodes, "step-000004", data.training_families),
        by_task(data.episodes, "noop", data.training_families),
    )
    assert rows["measured: trained minus no-op"][2].startswith(f"{over.mean:+.3f}"[:6])
    paired = rows["held out, last minus no-op, by the `paired` reward"][2]
    assert "n = 12, p = " in paired
    config_use = rows["a `[prime_rl]` key set, first → last"][2]
    assert config_use.startswith("1.000 [1.000, 1.000], n = ")


def test_what_the_arc_did_not_measure_is_taken_from_the_measurement_made_apart(run_folder):
    whole = gather(run_folder)
    names = {"step-000004": "step-4-0123abcd", "untrained": "untrained-4567abcd"}
    apart = replace(
        whole,
        training_families=(),
        episodes=tuple(
            replace(one, arm=names.get(one.arm, one.arm)) for one in whole.episodes if one.arm
        ),
    )
    trained = whole.training_families
    arc = replace(
        whole,
        episodes=tuple(one for one in whole.episodes if not one.arm or one.family not in trained),
    )
    by_key = {one.key: one for one in QUANTITIES}
    for key in ("measured", "measured_untrained", "over_untrained", "over_template", "no_op"):
        expected = by_key[key].ours(Evidence.of(whole, None))
        assert "n = 24" in expected
        assert by_key[key].ours(Evidence.of(arc, apart)) == expected
    assert by_key["measured"].ours(Evidence.of(arc, None)) == "not measured"
    assert "by the formula" in by_key["no_op"].ours(Evidence.of(arc, None))


def test_planned_recipes_are_those_that_were_preregistered():
    plan = {one.name: one for one in read_plan(RESULTS / "arc" / "arcs.toml").arcs}
    text = (RESULTS / "arc" / "PREREGISTRATION.md").read_text("utf-8")
    for one in plan.values():
        recipe, *settings = one.recipe.replace("--set ", "").split()
        config = load_recipe(RESULTS.parent / recipe, settings)
        assert f"`{recipe}`" in text
        assert config.outer.steps == (12 if one.kind == "agent" else 54)
        assert not set(config.families.training) & set(config.families.held_out)
        assert "triage" not in config.families.training
        jobs = config.outer.groups_per_step * config.outer.group_size
        assert jobs == (40 if one.name == "main" else 16)
        if one.kind == "leave_out":
            [left_out] = config.families.held_out
            assert left_out in one.title
            assert sorted((*config.families.training, left_out)) == sorted(TRAINING)
    main = load_recipe(RESULTS.parent / plan["main"].recipe)
    assert main.outer.held_out.episodes >= 200
    seeds = [plan[name].recipe for name in ("main", "cpu-1", "cpu-2")]
    assert len(set(seeds)) == 3


def test_the_sealed_set_is_shown_beside_what_pays(empty, run_folder, tmp_path):
    folder = tmp_path / "results"
    shutil.copytree(empty, folder)
    assert "## Sealed set C" not in (folder / "README.md").read_text("utf-8")
    records = read_records(run_folder)
    write_arc_data(records, folder / "arc" / "main" / "sweep")
    played = [one for one in records.episodes if one.arm == "noop" and one.family == "triage"]
    row = {"n": len(played), "dead": 0, "reward_mean": 0.4, "reward_ci": [0.3, 0.5]} | {
        "post_mean": 0.25, "post_ci": None, "post_n": 1,
    }  # fmt: skip
    figures = {
        "split": "c", "commitment": "c0ffee", "opened_at": "2026-01-02", "opened_before": 0,
        "opened": 1, "commit": None, "families": ["triage"], "seed": 8, "eval_items": 8,
        "baselines_a": {"triage": {"micro": 0.2, "nano": 0.3}}, "best_pre": {"triage": 0.31},
        "arms": {"noop": {"arm": "noop", **row}, "mine": {"arm": "elsewhere-1", **row}},
    }  # fmt: skip
    kept = folder / "arc" / "sealed-set-c.json"
    kept.write_text(json.dumps(figures))
    redraw(folder)
    rows = rows_of(folder / "README.md", "Sealed set C")
    best = next(one.best_pre for one in played if one.best_pre is not None)
    assert rows["best untrained base"][1:] == ["0.300", f"{best:.3f}", "0.310"]
    reward = sum(one.reward for one in played) / len(played)
    assert rows["noop: reward"][2].startswith(f"{reward:.3f} [")
    assert rows["noop: reward"][3] == f"0.400 [0.300, 0.500], n = {len(played)}"
    assert rows["noop: hidden score of its trained models"][3] == "0.250, n = 1"
    assert rows["mine: reward"][2] == "not measured"
    text = (folder / "README.md").read_text("utf-8")
    assert "opened once, 2026-01-02" in text
    assert "another seed" in text
    kept.write_text(json.dumps(figures | {"opened": 3, "opened_before": 1}))
    redraw(folder)
    assert "opened 3 times, this one is opening 2" in (folder / "README.md").read_text("utf-8")
    info = replace(records.info, config={**records.info.config, "inner": {"split": "c"}})
    write_arc_data(replace(records, info=info), folder / "arc" / "main" / "sweep")
    with pytest.raises(StoreError, match="sealed"):
        redraw(folder)


def test_figures_and_tables_of_an_arc_are_written(full, run_folder):
    folder = full / "arc" / "main"
    for name in ("reward", "decomposition", "bases_by_family", "exploration", "held_out"):
        svg = (folder / "figures" / f"{name}.svg").read_text("utf-8")
        assert ET.fromstring(svg).tag.endswith("svg")
        assert "<dc:date>" not in svg
        assert (folder / "figures" / f"{name}.csv").is_file()
    assert len(list(csv.DictReader((folder / "steps.csv").read_text().splitlines()))) == 4
    assert (folder / "power.csv").read_text().startswith("arm,against,families,")
    assert (full / "arc" / "figures" / "compare_reward.svg").is_file()
    summary = json.loads((full / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["heldout_n"] == 12
    text = (full / "README.md").read_text("utf-8")
    assert "Measured apart: main arc, one GPU" in text
    assert "- main arc, one GPU" not in text


def test_a_run_with_other_held_out_families_has_its_row(full, run_folder):
    gain = gather(run_folder).headline.held_out_gain
    rows = rows_of(full / "README.md", "Other held-out families, another agent")
    assert rows["ledger held out"][4].startswith(f"{gain.mean:+.3f}"[:6])
    assert set(rows["string_pipeline held out"][2:]) == {"not yet run"}


def test_redrawing_changes_nothing(empty):
    before = {path: path.read_bytes() for path in empty.rglob("*") if path.is_file()}
    redraw(empty)
    after = {path: path.read_bytes() for path in empty.rglob("*") if path.is_file()}
    assert before == after


def test_a_folder_without_a_plan_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"arcs\.toml"):
        redraw(tmp_path)
    (tmp_path / "arc").mkdir()
    (tmp_path / "arc" / "arcs.toml").write_text("[[arcs]]\nname = 'Bad Name'\n")
    with pytest.raises(ConfigError, match="published"):
        redraw(tmp_path)


def test_damaged_data_is_named(empty, tmp_path):
    folder = tmp_path / "results"
    shutil.copytree(empty, folder)
    (folder / "bench" / "spread.json").write_text("[")
    with pytest.raises(StoreError, match=r"spread\.json"):
        redraw(folder)
