"""A run that is cut off anywhere goes on after its last recorded turn and ends the same."""

import asyncio
import contextlib
import importlib.util
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from nestling.agent.policy import AgentTurn
from nestling.outer.batch import PlayedEpisode
from nestling.outer.plan import plan_group
from nestling.outer.store_log import StoreLog, step_reports
from nestling.store.group_commit import GroupCommit
from nestling.store.run_store import RunStore

SCRIPT = Path(__file__).with_name("killed_turns.py")


@pytest.fixture(scope="module")
def small():
    """The run that is also played in a process of its own."""
    spec = importlib.util.spec_from_file_location("killed_turns", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def recorded(folder):
    """Everything a run has found out, without its times."""
    with RunStore(folder / "run.db") as store:
        episodes = sorted(store.episodes.all(), key=lambda one: one.id)
        for episode in episodes:
            assert episode.state == "finished"
            del episode.summary["result"]["seconds"]
        return {
            "episodes": [(one.id, one.learner_version, one.summary) for one in episodes],
            "trajectories": [store.episodes.trajectory(one.id) for one in episodes],
            "turns": [
                (one.idx, one.text, one.ids, one.logprobs, one.observation, one.learner_version)
                for episode in episodes
                for one in store.episodes.turns(episode.id)
            ],
            "updates": [report.update for report in step_reports(store)],
        }


def sampled(folder):
    """How often each turn was sampled, by session and seed."""
    path = folder / "sampled.txt"
    return Counter(path.read_text().splitlines() if path.exists() else [])


def events(folder, kind):
    with RunStore(folder / "run.db") as store:
        return [event for event in store.events.since(0) if event.kind == kind]


async def calm_run(small, folder, **changes):
    folder.mkdir()
    learner = small.open_learner(folder)
    try:
        await small.play_run(folder, small.config(**changes), learner)
        return (await learner.publish()).model.weights.content_hash()
    finally:
        learner.close()


async def cut_run(small, folder, settings, turns):
    """Play until so many turn events were told, then cancel; True when the run ended before."""
    folder.mkdir(exist_ok=True)
    learner = small.open_learner(folder)
    running, seen = [], []

    def look(event):
        seen.append(event.kind)
        if seen.count("turn") == turns:
            running[0].cancel()

    try:
        async with asyncio.TaskGroup() as tasks:
            running.append(
                tasks.create_task(small.play_run(folder, settings, learner, events=look))
            )
            with contextlib.suppress(asyncio.CancelledError):
                await running[0]
        return not running[0].cancelled()
    finally:
        learner.close()


@pytest.mark.long
async def test_cut_in_the_middle_of_episodes_ends_the_same(small, tmp_path):
    """Cancelled between turns, and moved to another folder each time."""
    changes = {"steps": 2, "group_size": 2}
    expected = await calm_run(small, tmp_path / "calm", **changes)
    folder = tmp_path / "cut-0"
    for number, turns in enumerate((2, 9, 8)):
        assert not await cut_run(small, folder, small.config(**changes), turns)
        folder = folder.rename(tmp_path / f"cut-{number + 1}")
    learner = small.open_learner(folder)
    await small.play_run(folder, small.config(**changes), learner)
    found = (await learner.publish()).model.weights.content_hash()
    learner.close()
    assert found == expected
    assert recorded(folder) == recorded(tmp_path / "calm")
    assert sampled(folder).keys() == sampled(tmp_path / "calm").keys()
    assert sum(sampled(folder).values()) <= 24 + 3
    assert events(folder, "episode.restarted") == []


HELD = "train/000001/000"
"""The episode that is in its third turn when the first step is done and the run is cut off."""


async def cut_after_first_step(small, folder):
    folder.mkdir()
    settings = small.config(steps=4, group_size=2, max_staleness=1)
    learner, turns, running = small.open_learner(folder), [], []

    async def hold(session):
        if session.startswith(HELD):
            turns.append(session)
            if len(turns) == 3:
                await asyncio.Event().wait()

    learner.gate = hold
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        run = small.play_run(folder, settings, learner, on_step=lambda _: running[0].cancel())
        running.append(tasks.create_task(run))
        with contextlib.suppress(asyncio.CancelledError):
            await running[0]
    learner.close()
    with RunStore(folder / "run.db") as store:
        assert store.progress.num_done_steps() == 1
        assert store.episodes.get(HELD).state == "running"
        assert store.episodes.get(HELD).learner_version == 0
        assert store.episodes.num_turns(HELD) == 2
    return settings


@pytest.mark.long
async def test_episode_keeps_the_version_it_began_with(small, tmp_path):
    """Weights have moved on; those that began the episode are opened again for its other turns."""
    folder = tmp_path / "run"
    settings = await cut_after_first_step(small, folder)
    learner, reports = small.open_learner(folder), []
    await small.play_run(folder, settings, learner, on_step=reports.append)
    learner.close()
    versions = Counter()
    for line in sampled(folder).elements():
        session, _, version = line.rsplit(" ", 2)
        versions[session.split(":")[0], version] += 1
    assert versions[HELD, "0"] == 6
    assert versions[HELD, "1"] == 0
    assert versions["train/000001/001", "1"] == 6
    assert events(folder, "episode.restarted") == []
    with RunStore(folder / "run.db") as store:
        assert store.episodes.get(HELD).learner_version == 0
        assert store.episodes.get(HELD).summary["version"] == 0
        assert store.progress.group("train/000001").learner_version == 0
    assert [report.step for report in reports] == [2, 3, 4]
    assert reports[0].staleness_max == 1


@pytest.mark.long
async def test_episode_restarts_when_its_version_is_gone(small, tmp_path, caplog):
    folder = tmp_path / "run"
    settings = await cut_after_first_step(small, folder)
    shutil.rmtree(folder / "learner" / "step-000000")
    learner = small.open_learner(folder)
    await small.play_run(folder, settings, learner)
    learner.close()
    (event,) = events(folder, "episode.restarted")
    assert event.subject == HELD
    assert event.data == {"learner_version": 1, "turns": 2}
    assert "version 0 cannot be opened" in caplog.text
    with RunStore(folder / "run.db") as store:
        assert store.episodes.get(HELD).summary["version"] == 1
        assert {turn.learner_version for turn in store.episodes.turns(HELD)} == {1}
        assert store.episodes.num_turns(HELD) == 6


async def test_a_turn_is_one_small_write(small, tmp_path):
    folder = tmp_path / "run"
    await calm_run(small, folder, steps=1, group_size=2)
    kinds = Counter()
    with RunStore(folder / "run.db") as store:
        for event in store.events.since(0):
            kinds[event.kind] += 1
        bytes_of = [len(one.text.encode()) + 8 * len(one.ids) for one in all_turns(store)]
    assert kinds["episode.turn"] == kinds["episode.observed"] == 12
    assert max(bytes_of) < 1_000


def all_turns(store):
    return [turn for one in store.episodes.all() for turn in store.episodes.turns(one.id)]


@pytest.fixture
def plan(small):
    return plan_group(small.config(), ["ledger"], 0)


TURN = AgentTurn(text="a\ud800", ids=(1, 2), logprobs=(-0.5, -0.25), truncated=True)


async def test_turns_come_back_as_they_were(writer, store, plan):
    log, episode = StoreLog(writer), plan.episodes[0]
    assert await log.group_opened(plan) == {}
    await log.episode_started(episode, 3)
    assert await log.group_opened(plan) == {}
    turns = log.turn_log(episode)
    assert await turns.recorded() == []
    await turns.record(0, TURN, None)
    await turns.record(1, AgentTurn(text="script"), "answer")
    first, second = await log.turn_log(episode).recorded()
    assert first.turn == AgentTurn(text="a?", ids=(1, 2), logprobs=(-0.5, -0.25), truncated=True)
    assert (first.answer, second.answer) == ("answer", None)
    assert second.turn == AgentTurn(text="script")
    assert [one.learner_version for one in store.episodes.turns(episode.episode_id)] == [3, 3]
    assert await log.group_opened(plan) == {episode.episode_id: 3}


async def test_new_turn_replaces_what_had_been_said_after_it(writer, store, plan):
    log, episode = StoreLog(writer), plan.episodes[0]
    await log.group_opened(plan)
    await log.episode_started(episode, 0)
    turns = log.turn_log(episode)
    for number in range(4):
        await turns.record(number, AgentTurn(text=f"old {number}"), f"answer {number}")
    again = log.turn_log(episode)
    assert len(await again.recorded()) == 4
    await again.record(2, AgentTurn(text="new 2"), "other")
    await again.record(3, AgentTurn(text="new 3"), "more")
    kept = await log.turn_log(episode).recorded()
    assert [one.turn.text for one in kept] == ["old 0", "old 1", "new 2", "new 3"]
    assert [one.answer for one in kept] == ["answer 1", "other", "more", None]


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        ("DELETE FROM turns WHERE idx = 1", 1),
        ("DELETE FROM turns WHERE idx = 0", 0),
        ("UPDATE turns SET logprobs = x'0000803f' WHERE idx = 2", 2),
        ("UPDATE turns SET logprobs = NULL WHERE idx = 2", 2),
    ],
)
async def test_torn_turn_and_all_after_it_are_dropped(tmp_path, plan, damage, left):
    episode = plan.episodes[0]
    with RunStore(tmp_path / "run.db") as store, GroupCommit(store) as writer:
        log = StoreLog(writer)
        await log.group_opened(plan)
        await log.episode_started(episode, 0)
        turns = log.turn_log(episode)
        for number in range(3):
            await turns.record(number, TURN, "answer")
    with contextlib.closing(sqlite3.connect(tmp_path / "run.db")) as raw:
        raw.execute(damage)
        raw.commit()
    with RunStore(tmp_path / "run.db") as store, GroupCommit(store) as writer:
        turns = StoreLog(writer).turn_log(episode)
        assert len(await turns.recorded()) == left
        await turns.record(left, AgentTurn(text="again"), "answer" if left else None)
        kept = await StoreLog(writer).turn_log(episode).recorded()
        assert [one.turn.text for one in kept] == ["a?"] * left + ["again"]


async def test_other_version_forgets_the_turns(writer, store, plan):
    log, episode = StoreLog(writer), plan.episodes[0]
    await log.group_opened(plan)
    await log.episode_started(episode, 0)
    await log.turn_log(episode).record(0, TURN, None)
    await log.episode_started(episode, 0)
    assert len(await log.turn_log(episode).recorded()) == 1
    await log.episode_started(episode, 2)
    assert await log.turn_log(episode).recorded() == []
    assert store.episodes.get(episode.episode_id).learner_version == 2
    (event,) = [one for one in store.events.since(0) if one.kind == "episode.restarted"]
    assert event.data == {"learner_version": 2, "turns": 1}


async def test_finished_episode_keeps_the_last_answer(writer, store, plan, make_result):
    log, episode = StoreLog(writer), plan.episodes[0]
    await log.group_opened(plan)
    await log.episode_started(episode, 0)
    await log.turn_log(episode).record(0, TURN, None)
    said = {"role": "assistant", "text": "a", "result": "accepted"}
    result = make_result(episode, 1.0).model_validate(
        make_result(episode, 1.0).model_dump() | {"turns": [said], "num_turns": 1}
    )
    await log.episode_finished(PlayedEpisode(plan=episode, version=0, result=result))
    assert store.episodes.turns(episode.episode_id)[0].observation == "accepted"
    assert await log.group_opened(plan) == {}


def start(folder):
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_run_ends_bit_for_bit_as_an_undisturbed_one(tmp_path, seed):
    with start(tmp_path / "calm") as calm:
        *_, expected = calm.communicate()[0].split()
    rng = random.Random(seed)
    folder, kills = tmp_path / "killed-0", 0
    while True:
        with start(folder) as process:
            for _ in range(rng.randint(0, 12)):
                process.stdout.readline()
            time.sleep(rng.random() * 0.1)
            if kills < 8:
                process.kill()
            told = process.stdout.read()
        if process.returncode == 0:
            break
        kills += 1
        folder = folder.rename(tmp_path / f"killed-{kills}")
    *_, found = told.split()
    assert kills >= 4
    assert found == expected
    assert recorded(folder) == recorded(tmp_path / "calm")
    # A turn is lost only when the kill comes between its last token and its record.
    repeated = sampled(folder) - sampled(tmp_path / "calm")
    assert sampled(folder).keys() == sampled(tmp_path / "calm").keys()
    assert sum(repeated.values()) <= kills
