import os
import pickle
import shutil
import signal
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nestling.core.errors import ConfigError, JobFailedError, LearnerError
from nestling.inner.baselines import Baselines
from nestling.inner.scorers.embedded import EmbeddedScorer

from .conftest import FAMILY, N


def copy_of(base: Path, folder: Path) -> Path:
    return Path(shutil.copytree(base, folder))


def test_a_copy_of_the_base_scores_like_the_base(
    scorer: EmbeddedScorer, bases: dict[str, Path], tmp_path: Path
) -> None:
    copied = copy_of(bases["micro"], tmp_path / "model")
    own = scorer.score(bases["micro"], base="micro", family=FAMILY, split="b", n=N)
    other = scorer.score(copied, base="micro", family=FAMILY, split="b", n=N)
    assert own.correct == other.correct
    assert len(own.correct) == N
    assert own.weights_hash == other.weights_hash
    assert own.delta_norm == other.delta_norm == 0.0


def test_only_the_weights_of_a_trained_folder_are_read(
    scorer: EmbeddedScorer, bases: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy_of(bases["micro"], tmp_path / "model")
    for path in folder.iterdir():
        if path.suffix == ".json":
            path.write_text("not even JSON")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] += 3.0
    save_file(tensors, folder / "model.safetensors")
    score = scorer.score(folder, base="micro", family=FAMILY, split="b", n=2)
    assert score.delta_norm == pytest.approx(3.0 * len(tensors["model.norm.weight"]) ** 0.5)


def wrong_shape(path: Path) -> None:
    tensors = load_file(path)
    save_file(tensors | {"model.norm.weight": np.ones(3, np.float32)}, path)


def not_a_number(path: Path) -> None:
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = np.nan
    save_file(tensors, path)


def extra_tensor(path: Path) -> None:
    save_file(load_file(path) | {"hook": np.ones(3, np.float32)}, path)


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"weights": [1.0, 2.0]}))


def removed(path: Path) -> None:
    path.rename(path.with_name("pytorch_model.bin"))


@pytest.mark.parametrize("tamper", [wrong_shape, not_a_number, extra_tensor, pickled, removed])
def test_tampered_weights_are_refused_and_the_scorer_lives_on(
    scorer: EmbeddedScorer, bases: dict[str, Path], tmp_path: Path, tamper
) -> None:
    folder = copy_of(bases["micro"], tmp_path / "model")
    tamper(folder / "model.safetensors")
    scorer.fingerprint()
    before = scorer.process_id()
    with pytest.raises(JobFailedError) as caught:
        scorer.score(folder, base="micro", family=FAMILY, split="b", n=2)
    assert caught.value.reason == "scorer.refused"
    assert scorer.process_id() == before


def test_weights_of_another_base_are_refused(
    scorer: EmbeddedScorer, bases: dict[str, Path]
) -> None:
    with pytest.raises(JobFailedError, match="shape"):
        scorer.score(bases["nano"], base="micro", family=FAMILY, split="b", n=2)


@pytest.mark.long
@pytest.mark.parametrize(("family", "n"), [("no_such_family", 2)])
def test_wrong_set_up_is_a_config_error(
    scorer: EmbeddedScorer, bases: dict[str, Path], family: str, n: int
) -> None:
    with pytest.raises(ConfigError):
        scorer.score(bases["nano"], base="nano", family=family, split="b", n=n)


def test_unusable_secret_is_a_config_error(bases: dict[str, Path], tmp_path: Path) -> None:
    secret = tmp_path / "eval.key"
    secret.write_bytes(b"short")
    secret.chmod(0o600)
    scorer = EmbeddedScorer(secret_path=secret, bases=bases)
    try:
        with pytest.raises(ConfigError, match="5 bytes"):
            scorer.fingerprint()
    finally:
        scorer.close()


def test_secret_is_neither_in_arguments_nor_in_the_environment(
    scorer: EmbeddedScorer, secret_path: Path
) -> None:
    scorer.fingerprint()
    process = Path("/proc") / str(scorer.process_id())
    secret = secret_path.read_bytes()
    for name in ("cmdline", "environ"):
        content = (process / name).read_bytes()
        assert secret not in content
        assert secret.hex().encode() not in content
        assert str(secret_path).encode() not in content


@pytest.mark.long
def test_killed_scorer_is_started_again_and_gives_the_same_score(
    scorer: EmbeddedScorer, bases: dict[str, Path]
) -> None:
    before = scorer.score(bases["micro"], base="micro", family=FAMILY, split="b", n=N)
    killed = scorer.process_id()
    # Stopped first, so that the signal lands while the scorer owes an answer.
    os.kill(killed, signal.SIGSTOP)
    timer = threading.Timer(0.2, os.kill, (killed, signal.SIGKILL))
    timer.start()
    after = scorer.score(bases["micro"], base="micro", family=FAMILY, split="b", n=N)
    timer.join()
    assert scorer.process_id() != killed
    assert (after.correct, after.weights_hash) == (before.correct, before.weights_hash)


def test_scorer_that_never_comes_up_fails_the_job(
    bases: dict[str, Path], secret_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    scorer = EmbeddedScorer(secret_path=secret_path, bases=bases)
    with pytest.raises(JobFailedError) as caught:
        scorer.score(bases["micro"], base="micro", family=FAMILY, split="b", n=2)
    assert caught.value.reason == "scorer.died"
    assert scorer.process_id() is None


READY = '{"kind":"ready","fingerprint":"f","commitments":{"b":"c"}}'


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("", "scorer.start_timeout"),
        (READY, "scorer.timeout"),
        ("hello", "scorer.protocol"),
        (READY + "\n" + READY, "scorer.protocol"),
    ],
    ids=["silent", "stuck", "babbling", "out of step"],
)
def test_scorer_that_does_not_answer_properly_is_ended(
    bases: dict[str, Path],
    secret_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    says: str,
    reason: str,
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n[ -z '{says}' ] || echo '{says}'\nexec sleep 30\n")
    program.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(program))
    scorer = EmbeddedScorer(
        secret_path=secret_path, bases=bases, start_wall_s=0.4, score_wall_s=0.4
    )
    scorer.start()
    started = scorer.process_id()
    with pytest.raises(JobFailedError) as caught:
        scorer.score(bases["micro"], base="micro", family=FAMILY, split="b", n=2)
    assert caught.value.reason == reason
    assert scorer.process_id() is None
    assert not Path(f"/proc/{started}").exists()


def test_baseline_is_computed_once_and_then_read(
    scorer: EmbeddedScorer, bases: dict[str, Path], tmp_path: Path
) -> None:
    counting = CountingScorer(scorer)
    first = Baselines(counting, bases, folder=tmp_path)
    table = first.table((FAMILY,), "a", 4)
    assert [row.base for row in table] == ["micro", "nano"]
    assert counting.calls == 2
    assert first.best_base(FAMILY, "a", 4) in table
    again = Baselines(counting, bases, folder=tmp_path)
    assert again.table((FAMILY,), "a", 4) == table
    assert counting.calls == 2
    again.get("nano", FAMILY, "a", 3)
    again.get("nano", FAMILY, "b", 4)
    assert counting.calls == 4


def test_damaged_baseline_file_is_computed_again(
    scorer: EmbeddedScorer, bases: dict[str, Path], tmp_path: Path
) -> None:
    counting = CountingScorer(scorer)
    fresh = Baselines(counting, bases, folder=tmp_path).get("nano", FAMILY, "a", 4)
    (file,) = (tmp_path / "baselines").glob("*.json")
    file.write_text(file.read_text()[:-20])
    assert Baselines(counting, bases, folder=tmp_path).get("nano", FAMILY, "a", 4).correct == (
        fresh.correct
    )
    assert counting.calls == 2


def test_baseline_of_unknown_base_is_an_error(
    scorer: EmbeddedScorer, bases: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="huge"):
        Baselines(scorer, bases, folder=tmp_path).get("huge", FAMILY, "a", 4)


class CountingScorer:
    """The real scorer, with a count of how often it had to work."""

    def __init__(self, scorer: EmbeddedScorer) -> None:
        self._scorer = scorer
        self.calls = 0

    def start(self) -> None:
        self._scorer.start()

    def fingerprint(self) -> str:
        return self._scorer.fingerprint()

    def commitment(self, split):
        return self._scorer.commitment(split)

    def score(self, model_folder, **request):
        self.calls += 1
        return self._scorer.score(model_folder, **request)

    def close(self) -> None:
        self._scorer.close()


@pytest.mark.long
def test_a_stack_that_is_away_is_no_fault_of_the_job_and_does_not_kill_the_scorer(
    bases: dict[str, Path], secret_path: Path, tmp_path: Path
) -> None:
    away = str(tmp_path / "away.sock")
    scorer = EmbeddedScorer(secret_path=secret_path, bases=bases, stacks=(away,))
    with closing(scorer), pytest.raises(LearnerError, match=r"away\.sock cannot be reached"):
        scorer.fingerprint()
