"""More than the budget, or twice for once."""

from __future__ import annotations

import asyncio
import shutil
import threading
from typing import Final

from nestling.agent.tools import AgentTools
from nestling.agent.workspace import Workspace
from nestling.core.clock import SystemClock
from nestling.fleet.budget import Budget, BudgetRefusedError, Caps, Price
from nestling.fleet.queue import JobQueue
from nestling.jobs.budget import Caps as JobCaps
from nestling.jobs.probe import ProbeOptions, probe
from nestling.redteam.case import CaseList, Happened
from nestling.redteam.hostile_job import FAMILY, hostile_job, manifest
from nestling.redteam.room import JobRunnerOfRoom, TargetRoom
from nestling.store import RunStore
from nestling.store.jobs import NewJob

__all__ = ["CASES"]

_LIST = CaseList("spending and queue")
CASES = _LIST.cases

_PRICES: Final = {"box": Price(usd_per_hour=3600.0, unit="one box", source="one dollar a second")}


def _store(room: TargetRoom, name: str) -> RunStore:
    path = room.folder / f"{name}.db"
    for file in room.folder.glob(f"{name}.db*"):
        file.unlink()
    return RunStore(path)


@_LIST.case(
    "spend-parallel",
    act="reserve from eight threads at once what the cap holds only three times",
    expected="compare and reserve are one transaction",
)
def parallel(room: TargetRoom) -> Happened:
    """Each thread asks 20 times."""
    taken: list[str] = []
    with _store(room, "spend") as store:

        def ask(thread: int) -> None:
            money = Budget(store, clock=SystemClock(), caps=Caps(run_usd=3.0), prices=_PRICES)
            for n in range(20):
                try:
                    money.reserve(f"{thread}-{n}", machine="box", seconds=1.0)
                except BudgetRefusedError:
                    continue
                taken.append(f"{thread}-{n}")

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        total = store.money.total()
    return Happened(
        what=f"{len(taken)} reservations of 1 USD under a cap of 3 USD",
        succeeded=len(taken) > 3 or total.reserved_microusd > 3_000_000,
        evidence=f"{total.reserved_microusd} micro-dollars reserved",
    )


@_LIST.case(
    "spend-small-change",
    act="many jobs of a fraction of a micro-dollar, to round the cost away",
    expected="costs are rounded up",
)
def small_change(room: TargetRoom) -> Happened:
    """A thousand jobs of a tenth of a micro-dollar."""
    with _store(room, "change") as store:
        money = Budget(store, clock=SystemClock(), caps=Caps(run_usd=1e-4), prices=_PRICES)
        taken = 0
        for n in range(1000):
            try:
                money.reserve(str(n), machine="box", seconds=1e-7)
            except BudgetRefusedError:
                break
            taken += 1
    return Happened(what=f"{taken} of 1000 were taken", succeeded=taken > 100)


@_LIST.case(
    "spend-largest",
    act="submit the largest job that the settings allow under a small cap",
    expected="the predicted cost is compared with the cap before anything is trained",
)
def largest(room: TargetRoom) -> Happened:
    """In the probe."""
    toml = manifest("micro", max_steps=16, batch_size=64, max_tokens=128)
    report = probe(
        hostile_job(toml=toml),
        FAMILY,
        env_opener=room._opener,
        options=ProbeOptions(caps=JobCaps(cpu_s=10.0)),
    )
    return Happened(
        what="accepted" if report.ok else f"refused: {report.problems[0].code}",
        succeeded=report.ok,
        evidence="; ".join(report.lines()),
    )


@_LIST.case(
    "spend-resubmit",
    act="submit again and again, also after acceptance, and many submissions at once",
    expected="attempts are counted; one accepted job ends the episode",
)
def resubmit(room: TargetRoom) -> Happened:
    """Twenty calls; at most three probes."""
    root = room.folder / "episode" / "workspace"
    shutil.rmtree(root.parent, ignore_errors=True)
    root.parent.mkdir()
    workspace = Workspace.create(root, {"TASK.md": "x"})
    runner = JobRunnerOfRoom(room)
    tools = AgentTools(workspace, FAMILY, runner)

    async def submit() -> list[str]:
        return [await tools.call("submit_job", {}) for _ in range(20)]

    answers = asyncio.run(submit())
    counted = sum(answer.startswith("rejected") for answer in answers)
    return Happened(
        what=f"{counted} submissions were counted, {len(runner.checked)} probes ran",
        succeeded=counted > 3 or len(tools.attempts) > 3 or tools.accepted is not None,
        evidence=answers[-1],
    )


@_LIST.case(
    "queue-late-result",
    act="deliver a result with the token of a lease that is over, and the same result twice",
    expected="only the token of the present lease can finish a job, once",
)
def late_result(room: TargetRoom) -> Happened:
    """A worker that came back from the dead with a better score."""
    with _store(room, "queue") as store:
        queue = JobQueue(store, clock=SystemClock(), session="s", lease_s=60.0)
        queue.enqueue(NewJob(id="a", kind="run", payload={}))
        first = queue.claim("w1")
        assert first is not None
        queue.fail(first.token, "lost", "silent", retry=True)
        second = queue.claim("w2")
        assert second is not None
        stale = queue.complete(first.token, {"post": 1.0})
        real = queue.complete(second.token, {"post": 0.1})
        again = queue.complete(second.token, {"post": 1.0})
        forged = queue.complete("a#999", {"post": 1.0})
        result = store.jobs.get("a").result
    return Happened(
        what=f"stale {stale}, real {real}, again {again}, forged {forged}",
        succeeded=stale or again or forged or result != {"post": 0.1},
        evidence=str(result),
    )


@_LIST.case(
    "queue-reroll",
    act="submit the same job many times until its score comes out well",
    expected="the same content is the same job: one score, whoever asks",
)
def reroll(room: TargetRoom) -> Happened:
    """Twice through the queue, and twice through trainer and scorer."""
    with _store(room, "reroll") as store:
        queue = JobQueue(store, clock=SystemClock(), session="s")
        ids = {
            queue.enqueue(NewJob(id=f"j{n}", kind="run", payload={}, reuse_key="same")).id
            for n in range(20)
        }
    scores = {room.train(hostile_job()).post for _ in range(2)}
    return Happened(
        what=f"{len(ids)} queued, {len(scores)} different scores",
        succeeded=len(ids) != 1 or len(scores) != 1,
        evidence=f"{scores}",
    )
