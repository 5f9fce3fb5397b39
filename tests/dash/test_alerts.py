from dataclasses import replace

import pytest

from nestling.dash.alerts import find_alerts
from nestling.dash.fleet_facts import FleetFacts, QueueRow, WorkerRow
from nestling.outer.stats import Estimate
from nestling.report.gather import gather

IDLE = FleetFacts(workers=(), queue=(), window=(0.0, 600.0), refused=0)


@pytest.fixture(scope="module")
def data(runs):
    found = gather(runs / "calm")
    return replace(found, episodes=tuple(one for one in found.episodes if one.is_job_done))


def estimate(mean, half=0.02):
    return Estimate(mean=mean, lo=mean - half, hi=mean + half, n=40)


def codes(data, fleet=IDLE, *, now=None, jail="bubblewrap"):
    now = data.info.last_at if now is None else now
    return [one.code for one in find_alerts(data, fleet, now=now, jail=jail)]


def with_head(data, **changes):
    return replace(data, headline=replace(data.headline, **changes))


def with_groups(data, **counts):
    """Every step's groups counted anew."""
    steps = []
    for row in data.steps:
        groups = row.report.groups.model_copy(update={"used": 0, "constant": 0} | counts)
        steps.append(replace(row, report=row.report.model_copy(update={"groups": groups})))
    return replace(data, steps=tuple(steps))


def with_config(data, **tables):
    return replace(data, info=replace(data.info, config={**data.info.config, **tables}))


def worker(**changes):
    blank = dict.fromkeys(WorkerRow.__slots__)
    return WorkerRow(**{**blank, "name": "w0", "is_alive": True, "spans": (), **changes})


def test_a_run_that_learns_has_no_alert(data):
    assert codes(data) == []


def test_rise_that_the_measured_gain_does_not_share_is_divergence(data):
    rise = {"untrained": estimate(0.3), "final": estimate(0.6), "measured_gain": None}
    seen = {
        gain: codes(with_head(data, held_out_gain=estimate(gain), **rise))
        for gain in (0.2, 0.0, -0.2)
    }
    assert seen == {0.2: [], 0.0: ["reward.divergence"], -0.2: ["reward.divergence"]}
    fell = with_head(data, held_out_gain=estimate(-0.2), **rise)
    covers = with_head(data, held_out_gain=estimate(0.0), **rise)
    levels = [find_alerts(one, IDLE, now=0.0, jail=None)[0].level for one in (fell, covers)]
    assert levels == ["serious", "warning"]
    no_rise = {**rise, "final": estimate(0.31)}
    assert codes(with_head(data, held_out_gain=estimate(-0.2), **no_rise)) == []


def test_constant_groups_count_from_half(data):
    assert codes(with_groups(data, used=3, constant=2)) == []
    assert codes(with_groups(data, used=2, constant=2)) == ["groups.constant"]
    skipped = [
        replace(row, report=row.report.model_copy(update={"skipped": True})) for row in data.steps
    ]
    assert codes(replace(data, steps=tuple(skipped))) == ["groups.no_update"]


def test_dead_jobs_are_counted_over_accepted_ones_and_reasons_told(data):
    step = data.steps[-1].step
    recent = [one for one in data.train_episodes if one.step == step]
    dead = [
        replace(one, outcome_code="job_failed", detail="env.exited", id=f"dead-{one.id}")
        for one in recent
    ]
    assert codes(replace(data, episodes=(*data.episodes, *dead[:1]))) == []
    many = replace(data, episodes=(*data.episodes, *dead * 3))
    found = find_alerts(many, IDLE, now=0.0, jail=None)
    assert [one.code for one in found] == ["jobs.dead"]
    assert "env.exited" in found[0].text


def test_stale_episodes_are_told_against_the_bound(data):
    stale = replace(
        data,
        steps=tuple(
            replace(row, report=row.report.model_copy(update={"staleness_max": 2}))
            for row in data.steps
        ),
    )
    assert codes(with_config(stale, outer={"max_staleness": 2})) == []
    assert codes(with_config(stale, outer={"max_staleness": 1})) == ["staleness.over"]
    assert codes(with_groups(data, used=4, over_stale=1)) == ["staleness.over"]


def test_money_near_beyond_and_refused(data):
    spent = replace(data, usd=0.9, usd_reserved=0.0)
    assert codes(spent) == []
    assert codes(with_config(spent, budget={"run_usd": 1.0})) == ["money.near_cap"]
    assert codes(with_config(spent, budget={"run_usd": 2.0})) == []
    half = replace(spent, info=replace(spent.info, planned_steps=3 * len(data.steps)))
    capped = with_config(half, budget={"run_usd": 2.0})
    assert codes(capped) == ["money.will_pass_cap"]
    assert codes(data, replace(IDLE, refused=2)) == ["money.refused"]


def test_silent_workers_and_silent_runs(data):
    held = replace(IDLE, workers=(worker(job_id="j", heartbeat_at=0.0),))
    assert codes(data, held, now=100.0) == []
    assert codes(data, held, now=200.0) == ["fleet.no_heartbeat"]
    unfinished = replace(data, info=replace(data.info, planned_steps=99))
    assert codes(unfinished) == []
    assert codes(unfinished, now=data.info.last_at + 601) == ["run.silent"]
    queue = QueueRow(
        kind="run",
        queued=1,
        running=0,
        done=0,
        failed=0,
        retried=0,
        mean_wait_s=None,
        mean_run_s=None,
    )
    assert codes(data, replace(IDLE, queue=(queue,))) == ["fleet.no_workers"]


def test_no_jail_and_broken_episodes(data):
    assert codes(data, jail="none") == ["jail.none"]
    assert codes(replace(data, failed_episodes=1)) == ["episodes.broken"]
