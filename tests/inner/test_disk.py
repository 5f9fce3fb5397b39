"""A full disk, or one that may not be written to: the job ends in the system's own words and keeps what it has."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nestling.core.errors import JobFailedError
from nestling.inner.baselines import Baselines
from nestling.inner.disk import writing
from nestling.inner.pinned_base import PinnedBase
from nestling.inner.run import InnerContext, run_job
from nestling.inner.scorers.embedded import EmbeddedScorer
from nestling.inner.trainer import StepLog, Trainer, TrainRequest, TrainResult
from nestling.inner.trainers.prime_rl_faults import failure

from .conftest import FAMILY, job

pytestmark = pytest.mark.long

MakeContext = Callable[..., InnerContext]


class Obstructed:
    """A trainer in whose folder something stands where the weights go."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def train(self, request: TrainRequest, log: StepLog) -> TrainResult:
        (request.out_folder / "model.safetensors").mkdir()
        return self._trainer.train(request, log)


def test_a_model_that_cannot_be_written_is_an_outcome_with_all_that_was_measured(
    make_context: MakeContext,
) -> None:
    context = make_context()
    context = replace(context, trainer=Obstructed(context.trainer))
    outcome = run_job(job(max_steps=2, batch_size=16), FAMILY, context, lambda step: None)
    assert (outcome.status, outcome.reason) == ("failed", "train.disk")
    assert f"{context.work_folder}/" in outcome.detail
    assert "model.safetensors cannot be written: " in outcome.detail
    assert "free some" in outcome.detail
    assert outcome.train_steps == len(outcome.steps) == 2
    assert None not in (outcome.pre, outcome.best_pre)
    assert list(context.work_folder.iterdir()) == []


def test_a_work_folder_that_cannot_be_made_is_an_outcome(
    make_context: MakeContext, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    context = replace(make_context(), work_folder=tmp_path / "file" / "work")
    outcome = run_job(job(max_steps=1, batch_size=16), FAMILY, context, lambda step: None)
    assert (outcome.status, outcome.reason) == ("failed", "train.disk")
    assert outcome.detail.startswith(f"{context.work_folder} cannot be written: Not a directory; ")


def test_a_full_disk_is_told_with_place_reason_and_what_to_do() -> None:
    with (
        pytest.raises(JobFailedError) as caught,
        writing("train.disk", Path("/runs/models")),
        Path("/dev/full").open("w") as full,
    ):
        full.write("weights")
    assert caught.value.reason == "train.disk"
    assert caught.value.detail == (
        "/runs/models cannot be written: No space left on device; expected a disk with room that this user may write "
        "to; free some room and run the job again"
    )


def test_a_scorer_without_room_for_its_copy_says_where(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = PinnedBase(bases["nano"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(JobFailedError, match=r"gone/nestling-scored-.*No such file") as caught:
        base.load_trained(bases["nano"])
    assert caught.value.reason == "scorer.disk"


def test_a_baseline_that_cannot_be_kept_is_used_all_the_same(
    scorer: EmbeddedScorer,
    bases: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "state"
    known = Baselines(scorer, bases, folder=folder).get("nano", FAMILY, "b", 2)
    (kept,) = (folder / "baselines").glob("*.json")
    kept.unlink()
    (kept / "in the way").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        again = Baselines(scorer, bases, folder=folder).get("nano", FAMILY, "b", 2)
    assert again.correct == known.correct
    assert f"cannot write {kept}: Is a directory" in caplog.text


def test_prime_rl_without_room_is_told_by_the_line_that_says_it(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs" / "attempt_0"
    logs.mkdir(parents=True)
    (logs.parent / "latest").symlink_to(logs)
    (logs / "trainer.log").write_text("OSError: [Errno 28] No space left on device: '/runs/x'\n")
    error = failure(tmp_path / "run", tmp_path / "rl.log", 1)
    assert error.reason == "train.disk"
    assert "'/runs/x'" in error.detail
