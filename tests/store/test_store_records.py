"""What is written comes back the same, once, with its event."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.core.errors import StoreError
from nestling.store import RunStore
from nestling.store.blobs import (
    pack_flags,
    pack_floats,
    pack_ids,
    unpack_flags,
    unpack_floats,
    unpack_ids,
)
from nestling.store.episodes import TrajectoryRecord


@pytest.fixture
def store(tmp_path: Path):
    with RunStore(tmp_path / "run.db") as opened:
        yield opened


def start_episode(store: RunStore, episode_id: str = "e1") -> None:
    store.progress.open_group(
        "g1", purpose="train", step=0, family="ledger", seed=5, size=8, learner_version=0
    )
    store.episodes.start(
        episode_id, group_id="g1", idx=0, family="ledger", policy="embedded", seed=9
    )


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_round_trip(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_float32_values_round_trip_exactly(values: list[float]) -> None:
    assert unpack_floats(pack_floats(values)) == values


@given(st.lists(st.booleans()))
def test_flags_round_trip(flags: list[bool]) -> None:
    assert unpack_flags(pack_flags(flags)) == flags


def test_cut_blob_is_an_error() -> None:
    with pytest.raises(StoreError, match="damaged"):
        unpack_ids(b"abc")
    with pytest.raises(StoreError, match="damaged"):
        unpack_flags(pack_flags([True] * 9)[:-1])


def test_turns_come_back_for_replay_after_reopening(tmp_path: Path) -> None:
    logprobs = np.log(np.random.default_rng(0).random(3)).astype(np.float32).tolist()
    with RunStore(tmp_path / "run.db") as store:
        start_episode(store)
        store.episodes.add_turn("e1", 0, text="hello", ids=[1, 70_000, 3], logprobs=logprobs)
        store.episodes.add_observation("e1", 0, "a file")
        store.episodes.add_turn("e1", 1, text="bye", truncated=True)
    with RunStore(tmp_path / "run.db") as store:
        first, second = store.episodes.turns("e1")
        assert (first.ids, first.logprobs, first.observation) == (
            [1, 70_000, 3],
            logprobs,
            "a file",
        )
        assert (second.ids, second.truncated, second.observation) == (None, True, None)
        assert store.episodes.get("e1").state == "running"


def test_repeating_a_write_keeps_the_first(store: RunStore) -> None:
    start_episode(store)
    start_episode(store)
    store.episodes.add_turn("e1", 0, text="first")
    store.episodes.add_turn("e1", 0, text="second")
    store.episodes.add_attempt("e1", 0, job_hash="h", accepted=False, problems=[{"code": "x"}])
    store.episodes.add_attempt("e1", 0, job_hash="h", accepted=True)
    assert [turn.text for turn in store.episodes.turns("e1")] == ["first"]
    assert [attempt.problems for attempt in store.episodes.attempts("e1")] == [[{"code": "x"}]]
    kinds = [event.kind for event in store.events.of("e1")]
    assert kinds == ["episode.started", "episode.turn", "episode.attempt"]


def test_episode_is_paid_once(store: RunStore) -> None:
    start_episode(store)
    trajectory = TrajectoryRecord(
        ids=[1, 2, 3], sampled=[False, True, True], logprobs=[0.0, -0.5, -1.0]
    )
    pay = {"outcome": "trained", "kind": "seed", "terms": {"validation": 1.0}}
    assert store.episodes.finish("e1", reward=0.5, trajectory=trajectory, **pay)
    assert not store.episodes.finish("e1", reward=0.9, **pay)
    assert not store.episodes.fail("e1", "late")
    reward = store.episodes.reward("e1")
    assert reward is not None
    assert (reward.reward, reward.terms) == (0.5, {"validation": 1.0})
    assert store.episodes.trajectory("e1") == trajectory
    assert [event.kind for event in store.events.of("e1")][-1] == "episode.finished"


def test_steps_groups_versions_and_metrics(store: RunStore) -> None:
    start_episode(store)
    store.progress.start_step(0)
    store.progress.start_step(0)
    store.progress.mark_group("g1", "used", used_in_step=0)
    store.progress.finish_step(0, learner_version=1, summary={"reward_mean": 0.4})
    store.learner.publish(0, step=0, handle="v0")
    store.learner.publish(1, step=1, handle="v1", state_ref="abc", state={"rng": [1, 2]})
    store.metrics.record(0, {"reward/mean": 0.25})
    store.metrics.record(0, {"reward/mean": 0.5})
    assert store.progress.num_done_steps() == 1
    assert store.progress.groups(state="used")[0].used_in_step == 0
    newest = store.learner.get(1)
    assert newest is not None
    assert (newest.version, newest.state) == (1, {"rng": [1, 2]})
    assert [metric.value for metric in store.metrics.series("reward/mean")] == [0.5]


def test_record_without_its_owner_is_refused(store: RunStore) -> None:
    with pytest.raises(StoreError, match="refused"):
        store.episodes.add_turn("nobody", 0, text="x")
    with pytest.raises(StoreError, match="no episode"):
        store.episodes.get("nobody")


def test_change_and_event_are_undone_together(store: RunStore) -> None:
    seen = []
    store.events.subscribe(lambda event: seen.append(event.kind))
    before = store.events.last_seq()

    def half() -> None:
        with store.transaction():
            start_episode(store)
            store.episodes.get("nobody")

    with pytest.raises(StoreError, match="nobody"):
        half()
    assert store.episodes.all() == []
    assert store.events.last_seq() == before
    assert seen == []
    start_episode(store)
    assert seen == ["group.open", "episode.started"]


def test_inner_failure_undoes_only_itself(store: RunStore) -> None:
    with store.transaction():
        start_episode(store)
        with pytest.raises(StoreError):
            store.episodes.add_turn("nobody", 0, text="x")
        store.episodes.add_turn("e1", 0, text="kept")
    assert [turn.text for turn in store.episodes.turns("e1")] == ["kept"]
