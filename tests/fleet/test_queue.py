"""The queue loses no job and does none twice."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nestling.core.clock import SystemClock
from nestling.fleet.queue import Claim, JobQueue
from nestling.store import RunStore
from nestling.store.jobs import NewJob


@dataclass
class HandClock:
    """Both clocks, moved by hand."""

    wall_s: float = 1_900_000_000.0
    mono_s: float = 100.0

    def now(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.mono_s

    def advance(self, seconds: float) -> None:
        self.wall_s += seconds
        self.mono_s += seconds


def job(name: str, **fields) -> NewJob:
    return NewJob(id=name, kind="run", payload={"n": name}, **fields)


def claim(queue: JobQueue, worker: str = "w", **options) -> Claim:
    taken = queue.claim(worker, **options)
    assert taken is not None
    return taken


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def queue(tmp_path: Path, clock: HandClock):
    with RunStore(tmp_path / "run.db", clock=clock) as store:
        yield JobQueue(store, clock=clock, session="s1", lease_s=10.0)


def test_job_is_done_once(queue: JobQueue) -> None:
    queue.enqueue(job("a"))
    taken = claim(queue)
    assert queue.claim("other") is None
    assert queue.complete(taken.token, {"score": 1.5})
    done = queue.store.jobs.get("a")
    assert (done.state, done.result, done.tries) == ("done", {"score": 1.5}, 1)
    kinds = [event.kind for event in queue.store.events.of("a")]
    assert kinds == ["job.queued", "job.started", "job.done"]


def test_late_result_of_a_lost_lease_is_dropped_and_recorded(
    queue: JobQueue, clock: HandClock
) -> None:
    queue.enqueue(job("a"))
    slow = claim(queue, "slow")
    clock.advance(10.1)
    assert queue.expire() == ["a"]
    fast = claim(queue, "fast")
    assert queue.complete(fast.token, "fast")
    assert not queue.complete(slow.token, "slow")
    assert queue.fail(slow.token, "x", "y", retry=True) is None
    assert queue.store.jobs.get("a").result == "fast"
    dropped = [e for e in queue.store.events.of("a") if e.kind == "job.stale_dropped"]
    assert len(dropped) == 2


def test_heartbeat_keeps_the_lease_until_the_deadline(queue: JobQueue, clock: HandClock) -> None:
    queue.enqueue(job("a", deadline_s=25.0))
    taken = claim(queue)
    for _ in range(3):
        clock.advance(8.0)
        assert queue.heartbeat(taken.token, stage="train")
        assert queue.expire() == []
    clock.advance(2.0)
    assert queue.expire() == ["a"]
    ended = queue.store.jobs.get("a")
    assert (ended.state, ended.reason) == ("failed", "timed_out")
    assert not queue.heartbeat(taken.token)


def test_poison_job_is_given_up(queue: JobQueue, clock: HandClock) -> None:
    queue.enqueue(job("a", max_tries=3))
    for number in range(3):
        assert claim(queue).tries == number + 1
        clock.advance(11.0)
        queue.expire()
    assert queue.claim("w") is None
    ended = queue.store.jobs.get("a")
    assert (ended.state, ended.reason, ended.tries) == ("failed", "lost", 3)
    assert "gave up after 3 tries" in str(ended.detail)


def test_jump_of_the_wall_clock_changes_nothing(queue: JobQueue, clock: HandClock) -> None:
    queue.enqueue(job("a"))
    taken = claim(queue)
    for jump_s in (86_400.0, -10 * 86_400.0):
        clock.wall_s += jump_s
        assert queue.expire() == []
        assert queue.heartbeat(taken.token)
    assert queue.complete(taken.token, 1)


def test_controller_that_stood_still_blames_nobody(queue: JobQueue, clock: HandClock) -> None:
    queue.enqueue(job("a", deadline_s=60.0))
    taken = claim(queue)
    clock.advance(3600.0)
    queue.forgive(3600.0)
    assert queue.expire() == []
    clock.advance(9.0)
    assert queue.heartbeat(taken.token)


def test_groups_share_the_workers(queue: JobQueue) -> None:
    for number in range(20):
        queue.enqueue(job(f"big{number}", group_key="big"))
    for number in range(3):
        queue.enqueue(job(f"small{number}", group_key="small"))
    first = [claim(queue).job.group_key for _ in range(6)]
    assert Counter(first) == {"big": 3, "small": 3}
    assert {claim(queue).job.group_key for _ in range(17)} == {"big"}


def test_slow_group_gives_way_to_the_one_with_fewer_running(queue: JobQueue) -> None:
    for number in range(4):
        queue.enqueue(job(f"slow{number}", group_key="slow"))
        queue.enqueue(job(f"fast{number}", group_key="fast"))
    order = []
    for _ in range(8):
        taken = claim(queue)
        order.append(taken.job.group_key)
        if taken.job.group_key == "fast":
            queue.complete(taken.token, None)
    assert order[:5].count("fast") == 4


def test_priority_goes_before_fairness_and_lanes_are_apart(queue: JobQueue) -> None:
    queue.enqueue(job("low"))
    queue.enqueue(job("gpu", lane="gpu", priority=9))
    queue.enqueue(job("high", priority=5))
    assert claim(queue).job.id == "high"
    assert claim(queue).job.id == "low"
    assert queue.claim("w") is None
    assert claim(queue, lane="gpu").job.id == "gpu"


def test_same_work_is_joined_and_failed_work_is_done_anew(queue: JobQueue) -> None:
    first = queue.enqueue(job("a", reuse_key="k"))
    assert queue.enqueue(job("b", reuse_key="k")).id == first.id
    taken = claim(queue)
    assert queue.enqueue(job("c", reuse_key="k")).state == "running"
    queue.fail(taken.token, "broken", "x", retry=False)
    again = queue.enqueue(job("a", reuse_key="k"))
    assert (again.id, again.state) == ("a~2", "queued")
    queue.complete(claim(queue).token, 7)
    assert queue.enqueue(job("a", reuse_key="k")).result == 7


def test_waiting_job_can_be_cancelled(queue: JobQueue) -> None:
    queue.enqueue(job("a"))
    queue.enqueue(job("b"))
    assert claim(queue).job.id == "a"
    assert not queue.cancel("a")
    assert queue.cancel("b")
    assert queue.claim("w") is None


def test_drain_keeps_what_waits(queue: JobQueue) -> None:
    queue.enqueue(job("a"))
    queue.enqueue(job("b"))
    taken = claim(queue)
    queue.drain()
    assert queue.claim("w") is None
    assert queue.complete(taken.token, 1)
    assert queue.store.jobs.counts() == {"queued": 1, "running": 0, "done": 1, "failed": 0}


def test_next_controller_frees_what_the_last_one_held(tmp_path: Path, clock: HandClock) -> None:
    path = tmp_path / "run.db"
    with RunStore(path, clock=clock) as store:
        queue = JobQueue(store, clock=clock, session="s1")
        queue.enqueue(job("a"))
        old = claim(queue)
    clock.mono_s = 1.0  # the machine was started again
    with RunStore(path, clock=clock) as store:
        queue = JobQueue(store, clock=clock, session="s2")
        assert queue.recover() == ["a"]
        new = claim(queue)
        assert queue.recover() == []
        assert not queue.complete(old.token, "old")
        assert queue.complete(new.token, "new")


_DRAIN = """
import sys
from pathlib import Path
from nestling.core.clock import SystemClock
from nestling.fleet.queue import JobQueue
from nestling.store import RunStore
with RunStore(Path(sys.argv[1])) as store:
    queue = JobQueue(store, clock=SystemClock(), session=sys.argv[2])
    while (taken := queue.claim(sys.argv[2])) is not None:
        assert queue.complete(taken.token, sys.argv[2])
        print(taken.job.id, flush=True)
"""


def test_twenty_jobs_two_processes_each_once(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with RunStore(path) as store:
        queue = JobQueue(store, clock=SystemClock(), session="main")
        for number in range(20):
            queue.enqueue(job(f"j{number}", group_key=f"g{number % 3}"))
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", _DRAIN, str(path), f"w{number}"],
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]
        finished = [name for worker in workers for name in worker.communicate()[0].split()]
        assert [worker.returncode for worker in workers] == [0, 0]
        assert sorted(finished) == sorted(f"j{n}" for n in range(20))
        assert store.jobs.counts()["done"] == 20
        assert all(record.tries == 1 for record in store.jobs.all())


class QueueMachine(RuleBasedStateMachine):
    """Any order of claims, silences, failures, restarts and late messages."""

    @initialize()
    def begin(self) -> None:
        self.clock = HandClock()
        self.folder = tempfile.TemporaryDirectory()
        self.store = RunStore(Path(self.folder.name) / "run.db", clock=self.clock)
        self.session = 0
        self.queue = JobQueue(self.store, clock=self.clock, session="0", lease_s=10.0)
        self.tokens: list[str] = []
        self.done: Counter[str] = Counter()
        self.num_jobs = 0

    @rule(group=st.sampled_from("abc"), priority=st.integers(0, 2))
    def enqueue(self, group: str, priority: int) -> None:
        self.queue.enqueue(
            job(f"j{self.num_jobs}", group_key=group, priority=priority, max_tries=2)
        )
        self.num_jobs += 1

    @rule()
    def take(self) -> None:
        taken = self.queue.claim("w")
        if taken is not None:
            self.tokens.append(taken.token)

    @rule(seed=st.integers(0, 99), how=st.sampled_from(["complete", "retry", "give up"]))
    def answer(self, seed: int, how: str) -> None:
        if not self.tokens:
            return
        token = random.Random(seed).choice(self.tokens)  # often one that is over
        if how != "complete":
            self.queue.fail(token, "broken", "x", retry=how == "retry")
        elif self.queue.complete(token, 1):
            self.done[token.partition("#")[0]] += 1

    @rule(seconds=st.floats(0, 15))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.queue.expire()

    @rule()
    def restart(self) -> None:
        self.session += 1
        self.queue = JobQueue(self.store, clock=self.clock, session=str(self.session), lease_s=10.0)
        self.queue.recover()

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "store"):
            return
        counts = self.store.jobs.counts()
        assert sum(counts.values()) == self.num_jobs
        assert counts["done"] == len(self.done)
        assert all(number == 1 for number in self.done.values())
        assert self.store.jobs.waiting() == counts["queued"]
        assert {lease.job_id for lease in self.store.jobs.leases()} == {
            record.id for record in self.store.jobs.all("running")
        }

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()


QueueMachine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, database=None
)
TestQueueMachine = QueueMachine.TestCase
