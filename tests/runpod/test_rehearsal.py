"""Whole fleets in virtual time: what goes wrong, and what it costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from nestling.fleet.runpod_simulator.script import Script

from .conftest import API_KEY, EVAL_SECRET
from .fault_cases import CASES, Case
from .rehearsal import Rehearsal, rehearse

pytestmark = pytest.mark.timeout(900)

JOBS_S = [120.0, 120.0, 120.0, 120.0]


def script(**fields) -> Script:
    return Script.model_validate({"boot_s": 120.0, "boot_spread": 0.0} | fields)


def idle_while_waiting_s(done: Rehearsal) -> float:
    """Longest time in which a pod was ready without a job although one waited."""
    ready: set[str] = set()
    waiting = running = 0
    worst, since = 0.0, None
    for at, kind, subject, _ in done.events:
        waiting += (kind in ("job.queued", "job.requeued")) - (kind == "job.started")
        running += kind == "job.started"
        running -= kind in ("job.done", "job.failed", "job.requeued")
        if kind == "pod.ready":
            ready.add(subject)
        elif kind == "pod.ending":
            ready.discard(subject)
        if waiting > 0 and len(ready) > running:
            since = at if since is None else since
        elif since is not None:
            worst, since = max(worst, at - since), None
    return worst


def assert_kept_no_secret(done: Rehearsal, folder: Path, run_secrets: list[str]) -> None:
    """Nothing secret in what the API was sent, in the run folder, or in any log of a pod."""
    texts = {"requests": done.seen.encode()}
    for path in folder.rglob("*"):
        inside = path.relative_to(folder).parts
        if path.is_file() and inside[0] != "state":
            texts[str(path)] = path.read_bytes()
    needles = [API_KEY, EVAL_SECRET.hex(), EVAL_SECRET.decode(), *run_secrets]
    for name, data in texts.items():
        for needle in needles:
            assert needle.encode() not in data, f"{needle[:12]}... is in {name}"


def secrets_of(folder: Path) -> list[str]:
    """The boot key and TLS key of the run, as they could appear in text."""
    found = []
    for path in (folder / "state" / "pods").rglob("*"):
        if path.name == "boot.key":
            found += [path.read_bytes().hex(), _boot_text(path.read_bytes())]
        elif path.name == "key.pem":
            found.append(path.read_text().splitlines()[1])
    assert len(found) == 3
    return found


def _boot_text(key: bytes) -> str:
    import base64

    return base64.urlsafe_b64encode(key).decode().rstrip("=")


@pytest.mark.long
def test_warm_pods_are_never_idle_while_a_job_waits_and_are_gone_after(tmp_path: Path) -> None:
    """`fleet up` with boots of two minutes, then a run: what docs/runpod.md promises."""
    done = rehearse(
        tmp_path,
        script(),
        durations_s=[100.0, 240.0, 60.0, 100.0, 60.0, 30.0],
        workers=3,
        warm=2,
        linger_s=400.0,
    )
    assert done.states == ["done"] * 6
    assert done.first_start_s == pytest.approx(120.0, abs=2.0)
    assert idle_while_waiting_s(done) < 2.0
    ends = [at for at, kind, _, _ in done.events if kind == "job.done"]
    assert len(done.of("pod.ending")) == 3
    assert all(at <= max(ends) + 300.0 + 2.0 for at, *_ in done.of("pod.ending"))
    assert done.last_gone_s <= max(ends) + 300.0 + 2 * 12.0 + 2.0
    assert (done.made, done.left) == (3, 0)
    assert_kept_no_secret(done, tmp_path, secrets_of(tmp_path))


SIXTEEN = {
    "boot_s": 120.0,
    "boot_spread": 0.3,
    "per_minute": 90,
    "catalog_lag_s": 120.0,
    "list_lag_s": 10.0,
    "stock": [
        {"gpu": "NVIDIA RTX A5000", "count": 5, "usd_per_hour": 0.27, "shown": "HIGH"},
        {"gpu": "NVIDIA A40", "count": 6, "usd_per_hour": 0.44},
        {"gpu": "NVIDIA GeForce RTX 4090", "count": 6, "usd_per_hour": 0.74},
        {"gpu": "NVIDIA RTX A6000", "count": 8, "usd_per_hour": 0.49},
    ],
    "request": [
        {"route": "create", "nth": [2], "do": "reply_lost", "how": "timeout", "seconds": 90},
        {"route": "create", "nth": [5, 19], "do": "reply_lost", "how": "closed"},
        {"route": "create", "nth": [7], "do": "reply_lost", "how": "502"},
        {"route": "create", "nth": [9, 17], "do": "not_done", "how": "500"},
        {"route": "create", "nth": [11, 12], "do": "stock_out"},
        {"route": "list", "after_s": 400, "for_s": 120, "do": "status", "status": 503},
        {"route": "list", "nth": [6], "do": "stall", "seconds": 30},
        {"route": "list", "nth": [8], "do": "html", "status": 502},
        {"route": "delete", "after_s": 700, "for_s": 60, "do": "status", "status": 500},
    ],
    "pod": [
        {"pods": [1], "do": "freeze", "after_s": 200},
        {"pods": [2], "do": "slow", "seconds": 200},
        {"pods": [3], "do": "kill", "after_s": 90},
        {"pods": [4], "do": "no_runtime"},
        {"pods": [5], "do": "vanish", "after_s": 150},
        {"pods": [6], "do": "error"},
        {"pods": [7], "do": "exit", "after_s": 250},
        {"pods": [8], "do": "early_running"},
        {"pods": [9], "do": "crash_loop", "after_s": 100},
        {"pods": [10], "do": "delete_lag", "seconds": 20},
        {"pods": [12], "do": "freeze", "after_s": 30},
        {"pods": [14], "do": "get_lag", "seconds": 40},
    ],
}
"""An evening on which everything goes wrong."""


@pytest.mark.long
def test_a_small_fleet_with_every_kind_of_trouble(tmp_path: Path) -> None:
    """The fast version of the evening below: one fault of each kind on three pods."""
    trouble = {
        "request": [
            {"route": "create", "nth": [1], "do": "reply_lost", "how": "closed"},
            {"route": "create", "nth": [2], "do": "stock_out"},
            {"route": "list", "nth": [3, 4], "do": "status", "status": 503},
            {"route": "delete", "nth": [1], "do": "status", "status": 500},
        ],
        "pod": [{"pods": [1], "do": "freeze", "after_s": 60}],
        "per_minute": 20,
    }
    done = rehearse(tmp_path, script(**trouble), durations_s=[120.0] * 4, fleet={"max_usd": 0.5})
    assert (done.error, done.states, done.left) == ("", ["done"] * 4, 0)
    assert sum(done.tries) == 5
    assert done.made == 3
    assert done.usd <= 0.5
    assert any("silent" in data["why"] for *_, data in done.of("pod.ending"))
    assert_kept_no_secret(done, tmp_path, secrets_of(tmp_path))


@pytest.mark.slow
def test_the_cap_of_the_run_ends_it(tmp_path: Path) -> None:
    done = rehearse(
        tmp_path, script(), durations_s=[900.0] * 4, fleet={"max_usd": 0.09, "idle_s": 60.0}
    )
    assert "fleet.max_usd = 0.09" in done.error
    assert 0.05 < done.usd <= 0.09
    assert done.left == 0


@pytest.mark.slow
def test_forty_jobs_on_sixteen_pods_while_everything_goes_wrong(tmp_path: Path) -> None:
    """A batch of the published arc: 40 jobs of 2 to 6 minutes, within a cap of the whole run."""
    cap_usd = 6.0
    done = rehearse(
        tmp_path,
        script(**SIXTEEN),
        durations_s=[120.0 + 240.0 * (n * 7 % 40) / 40 for n in range(40)],
        workers=16,
        fleet={"max_usd": cap_usd, "max_usd_per_hour": 10.0},
        linger_s=400.0,
    )
    whys = [data["why"] for *_, data in done.of("pod.ending")]
    print(
        f"\n{done.made} pods, {done.usd:.3f} USD, {done.makespan_s:.0f} s, tries {sum(done.tries)}"
    )
    print(f"statuses {done.statuses}")
    for why in sorted(set(whys)):
        print(f"{whys.count(why)} x {why[:100]}")
    assert done.error == ""
    assert done.states == ["done"] * 40
    assert done.left == 0
    assert done.usd <= cap_usd
    for why in ("silent", "restarted", "no word", "vanished", "ERROR", "EXITED"):
        assert any(why in one for one in whys), why
    num_done = [event for event in done.events if event[1] == "job.done"]
    assert len(num_done) == 40
    assert idle_while_waiting_s(done) < 2.0
    assert_kept_no_secret(done, tmp_path, secrets_of(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fault_costs_little_and_loses_nothing(
    case: Case, tmp_path: Path, undisturbed: Rehearsal, record_property
) -> None:
    done = rehearse(
        tmp_path,
        script(**case.script),
        durations_s=JOBS_S,
        fleet=case.fleet,
        linger_s=case.linger_s,
    )
    lost_usd = done.usd - undisturbed.usd
    later_s = done.makespan_s - undisturbed.makespan_s
    print(f"\n| {case.name} | {case.happens} | {later_s:.0f} s | {max(lost_usd, 0):.4f} |")
    record_property("lost_usd", lost_usd)
    assert done.error == ""
    assert done.states == ["done"] * len(JOBS_S)
    assert done.left == 0
    assert lost_usd <= case.max_lost_usd
    if case.event is not None:
        kind, why = case.event
        assert any(why in data.get("why", "") for _, _, _, data in done.of(kind)), done.of(kind)
    assert_kept_no_secret(done, tmp_path, secrets_of(tmp_path))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    with pytest.MonkeyPatch.context() as patch:
        from .conftest import set_pod_environment

        set_pod_environment(patch)
        done = rehearse(tmp_path_factory.mktemp("undisturbed"), script(), durations_s=JOBS_S)
    assert done.states == ["done"] * len(JOBS_S)
    print(f"\nundisturbed: {done.usd:.4f} USD, {done.makespan_s:.0f} s")
    return done
