import hashlib

import numpy as np
import pytest

from nestling.agent.episode_result import EpisodeResult
from nestling.core.errors import StoreError
from nestling.core.rundir import RunDir
from nestling.outer.store_log import step_reports
from nestling.report.gather import gather
from nestling.report.samples import pick_episodes, read_details
from nestling.report.summary import summarise_run
from nestling.store import RunStore
from nestling.store.money import Reservation


@pytest.fixture(scope="module")
def data(run_folder):
    return gather(run_folder)


@pytest.fixture(scope="module")
def results(run_folder):
    """Every result, read by hand: (group, member) -> result."""
    with RunStore.open_reader(run_folder / "run.db") as store:
        return {
            (record.group_id, record.idx): EpisodeResult.model_validate(record.summary["result"])
            for record in store.episodes.all(state="finished")
        }


def of_step(results, run_folder, step):
    with RunStore.open_reader(run_folder / "run.db") as store:
        ids = [g.id for g in store.progress.groups(purpose="train") if g.used_in_step == step]
    return {key: one for key, one in results.items() if key[0] in ids}


def test_steps_agree_with_the_episodes(data, results, run_folder):
    assert [row.step for row in data.steps] == [1, 2, 3, 4]
    for row in data.steps:
        played = of_step(results, run_folder, row.step)
        found = list(played.values())
        valid = [one for one in found if one.valid_attempt]
        scored = [one.outcome for one in found if one.outcome_code == "job_succeeded"]
        assert len(found) == row.report.episodes == 16
        assert row.report.summary.reward.mean == pytest.approx(np.mean([r.reward for r in found]))
        for term in ("validation", "quality", "speed"):
            mean = np.mean([getattr(one.terms["seed"], term) for one in found])
            assert getattr(row, term).mean == pytest.approx(mean)
        assert row.validity.mean == pytest.approx(len(valid) / 16)
        assert row.first_try.mean == pytest.approx(np.mean([r.valid_attempt == 1 for r in found]))
        assert row.job_success.mean == pytest.approx(len(scored) / len(valid))
        assert (row.post.n, row.best_pre.n) == (len(scored), len(scored))
        assert row.post.mean == pytest.approx(np.mean([one.post for one in scored]))
        gap = row.post.mean - row.best_pre.mean
        assert row.report.summary.uplift.mean == pytest.approx(gap)
        assert row.attempts == pytest.approx(np.mean([len(one.attempts) for one in found]))
        groups = {key[0] for key in played}
        best = [max(r.reward for key, r in played.items() if key[0] == g) for g in groups]
        assert (row.num_groups, row.group_size) == (4, 4.0)
        assert row.best_of_group.mean == pytest.approx(np.mean(best))
        jobs = {(one.manifest.base_model, one.manifest.prime_rl["lr"]) for one in valid}
        assert row.distinct_share == pytest.approx(len(jobs) / len(valid))
        on_better = [one.manifest.base_model == "micro" for one in valid]
        assert row.better_base.mean == pytest.approx(np.mean(on_better))


def test_terms_have_intervals_over_groups(data, results, run_folder):
    row = data.steps[0]
    played = of_step(results, run_folder, 1)
    groups = sorted({key[0] for key in played})
    sums = np.array(
        [[r.terms["seed"].validation for k, r in played.items() if k[0] == g] for g in groups]
    ).sum(axis=1)
    picks = np.random.default_rng(1).integers(0, 4, size=(20_000, 4))
    lo, hi = np.quantile(sums[picks].sum(axis=1) / 16, [0.025, 0.975])
    assert row.validation.lo == pytest.approx(lo, abs=0.02)
    assert row.validation.hi == pytest.approx(hi, abs=0.02)


def test_no_op_is_measured_and_computed_alike(data):
    """Half the episodes are ledger (0.25), half dispatch (0.4); speed 1 at no training."""
    by_hand = 0.35 + 0.60 * 0.25 * (0.25 + 0.4) / 2 + 0.05
    assert data.steps[0].families == {"dispatch": 8, "ledger": 8}
    assert data.steps[0].no_op_formula == pytest.approx(by_hand)
    assert data.steps[0].references["noop"] == pytest.approx(by_hand)
    assert set(data.steps[0].references) == {"noop", "random", "template"}
    assert data.headline.no_op == pytest.approx(by_hand)
    assert data.headline.no_op_source == "measured"
    no_op = next(row for row in data.references if (row.arm, row.family) == ("noop", "all"))
    assert (no_op.reward.n, no_op.validity, no_op.uplift.mean) == (24, 1.0, 0.0)


def test_headline_compares_untrained_and_last_window(data, results, run_folder):
    first = [r.reward for r in of_step(results, run_folder, 1).values()]
    last = [r.reward for r in of_step(results, run_folder, 4).values()]
    assert data.headline.window_steps == 1
    assert data.headline.untrained.mean == pytest.approx(np.mean(first))
    assert data.headline.final.mean == pytest.approx(np.mean(last))
    assert data.headline.best.mean >= data.headline.final.mean


def test_held_out_gain_is_paired(data, results):
    pairs = [
        results["measure/step-000004/triage", i].reward
        - results["measure/untrained/triage", i].reward
        for i in range(12)
    ]
    gain = data.headline.held_out_gain
    assert (gain.n, data.headline.held_out_families) == (12, ("triage",))
    assert gain.mean == pytest.approx(np.mean(pairs))
    assert 0 < gain.p_value <= 1
    assert list(data.sweeps) == [0, 4]


def test_training_families_are_compared_in_pairs_too(data, results):
    pairs = [
        results[f"measure/step-000004/{family}", i].reward
        - results[f"measure/untrained/{family}", i].reward
        for family in ("ledger", "dispatch")
        for i in range(12)
    ]
    gain = data.headline.measured_gain
    assert (gain.n, data.headline.measured_step) == (24, 4)
    assert gain.mean == pytest.approx(np.mean(pairs))
    both = (data.headline.measured, data.headline.measured_untrained)
    assert both[0].mean - both[1].mean == pytest.approx(gain.mean)
    summary = summarise_run(data)
    assert (summary.final_reward, summary.untrained_reward) == tuple(one.mean for one in both)
    assert summary.best_reward == max(data.headline.best.mean, both[0].mean)


def test_jobs_and_money(data):
    done = [job for job in data.jobs if job.state == "succeeded"]
    assert [job.state for job in data.jobs if job not in done] == ["queued"]
    assert data.usd == pytest.approx(0.001 * len(done))
    assert data.usd_reserved == 0
    assert [cost.machine for cost in data.costs] == ["cpu-core"]
    assert data.gpu_minutes == 0
    summary = summarise_run(data)
    assert (summary.jobs, summary.steps, summary.commit) == (len(done), 4, "0123456789abcdef0123")


def test_run_as_a_whole(data):
    assert data.info.seeds == {"outer.seed": 7, "inner.seed": 11}
    assert (data.info.planned_steps, data.is_finished) == (4, True)
    assert data.training_families == ("ledger", "dispatch")
    assert data.better_base == {"ledger": "micro", "dispatch": "micro", "triage": "micro"}
    assert data.info.wall_s > 0


def test_gathering_twice_gives_the_same(data, run_folder):
    before = hashlib.sha256((run_folder / "run.db").read_bytes()).hexdigest()
    assert gather(run_folder) == data
    assert hashlib.sha256((run_folder / "run.db").read_bytes()).hexdigest() == before


def test_samples_are_best_median_worst(data, run_folder):
    picks = pick_episodes(data)
    ledger = sorted(one.reward for one in data.train_episodes if one.family == "ledger")
    chosen = {place: pick.row for pick in picks if pick.row.family == "ledger" for place in pick.places}  # fmt: skip
    assert chosen["best"].reward == ledger[-1]
    assert chosen["worst"].reward == ledger[0]
    assert chosen["median"].reward == ledger[(len(ledger) - 1) // 2]
    triage = [pick.row.arm for pick in picks if pick.row.family == "triage"]
    assert set(triage) == {"step-000004"}
    best = next(one for one in read_details(run_folder, picks, data.weights) if "best" in one.pick.places)  # fmt: skip
    assert set(best.files) == {"job.toml", "environment/__init__.py"}
    assert len(best.result.outcome.steps) == 8


def test_lost_job_files_are_no_error(data, run_folder, tmp_path):
    copy = RunDir.create(tmp_path / "copy")
    copy.database.write_bytes((run_folder / "run.db").read_bytes())
    details = read_details(copy.root, pick_episodes(data), data.weights)
    assert {one.files for one in details if one.result.valid_attempt} == {None}


def test_one_group_a_step_needs_a_wider_window(make_run, tmp_path):
    folder = make_run(tmp_path / "thin", steps=3, groups=1, measured=False)
    data = gather(folder)
    assert [row.families for row in data.steps] == [{"ledger": 4}, {"dispatch": 4}, {"ledger": 4}]
    assert data.headline.window_steps == 2
    assert data.headline.final.n == 8
    # The line follows the family of the step when nothing was measured.
    assert [row.no_op_formula for row in data.steps] == pytest.approx([0.4375, 0.46, 0.4375])
    assert data.headline.no_op_source == "formula"
    assert data.steps[0].validation.lo is not None
    assert data.headline.held_out_gain is None
    assert summarise_run(data).final_reward == data.headline.final.mean


def test_unfinished_run(make_run, tmp_path):
    folder = make_run(tmp_path / "cut", steps=1, planned=5, measured=False)
    with RunStore(folder / "run.db") as store:
        group = {"purpose": "train", "step": 1, "family": "ledger", "seed": 1, "size": 4}
        store.progress.open_group("train/000099", **group, learner_version=1)
        for member in range(2):
            store.episodes.start(
                f"train/000099/{member:03d}", group_id="train/000099", idx=member,
                family="ledger", policy="learner", seed=1,
            )  # fmt: skip
        store.episodes.fail("train/000099/001", "worker lost")
    data = gather(folder)
    assert data.is_finished is False
    assert (data.running_episodes, data.failed_episodes, len(data.steps)) == (1, 1, 1)


def test_gpu_minutes_and_open_reservations(tmp_path):
    folder = RunDir.create(tmp_path / "gpu")
    with RunStore(folder.database) as store:
        for name, machine in (("a", "h200"), ("b", "cpu-core"), ("c", "h200")):
            money = Reservation(
                id=name, microusd=500_000, machine=machine, day="2030-01-01", family="ledger"
            )
            store.money.reserve(money, {})
        store.money.settle("a", 250_000, 90.0)
        store.money.settle("b", 10_000, 60.0)
    data = gather(folder.root)
    assert data.gpu_minutes == pytest.approx(1.5)
    (folder.root / "config.toml").write_text("[fleet]\nworkers_per_machine = 3\n")
    assert gather(folder.root).gpu_minutes == pytest.approx(0.5)
    assert data.usd == pytest.approx(0.26)
    assert data.usd_reserved == pytest.approx(0.5)
    assert [(cost.family, cost.tries) for cost in data.family_costs] == [("ledger", 2)]
    assert data.family_costs[0].usd == pytest.approx(0.26)


def test_empty_run_has_nothing_but_says_so(tmp_path):
    folder = RunDir.create(tmp_path / "empty")
    with RunStore(folder.database):
        pass
    summary = summarise_run(gather(folder.root))
    assert (summary.steps, summary.jobs) == (0, 0)
    assert {value for name, value in summary if name not in ("steps", "jobs")} == {None}


def test_bad_folders_are_told_apart(tmp_path, make_run, run_folder):
    with pytest.raises(StoreError, match=r"no run store at .*expected the run\.db"):
        gather(tmp_path / "nowhere")
    torn = RunDir.create(tmp_path / "torn")
    data = bytearray((run_folder / "run.db").read_bytes())
    data[4096:40_960] = b"\xff" * (40_960 - 4096)
    torn.database.write_bytes(data)
    with pytest.raises(StoreError, match="damaged"):
        gather(torn.root)
    torn.database.write_bytes(b"this is not a database" * 100)
    with pytest.raises(StoreError, match=r"damaged|no run store"):
        gather(torn.root)


def test_unreadable_records_are_store_errors(tmp_path):
    folder = RunDir.create(tmp_path / "odd")
    with RunStore(folder.database) as store:
        store.progress.start_step(1)
        store.progress.finish_step(1, learner_version=1, summary={"unknown": 1})
    with pytest.raises(StoreError, match="cannot read"):
        gather(folder.root)
    folder.config.write_text("not = = toml")
    with pytest.raises(StoreError, match=r"config\.toml"):
        gather(folder.root)


def test_reports_are_those_of_the_run(data, run_folder):
    with RunStore.open_reader(run_folder / "run.db") as store:
        assert [row.report for row in data.steps] == step_reports(store)
