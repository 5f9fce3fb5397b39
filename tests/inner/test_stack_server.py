"""The loop of a stack process, run in this one: connections that break off, devices that are away."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError, JobFailedError, LearnerError
from nestling.engine.losses import Dppo
from nestling.engine.optim import AdamW
from nestling.families.splits import EvalSecret
from nestling.inner import stack_wire as wire
from nestling.inner.score_wire import ScoreRequest
from nestling.inner.scoring import Scoring
from nestling.inner.stack_client import StackJob, Stacks
from nestling.inner.stack_config import StackConfig
from nestling.inner.stack_server import StackServer
from nestling.inner.stack_settings import LearnSettings

from .conftest import FAMILY

CONFIG = StackConfig(max_jobs=2, rows_per_job=4, max_len=128, memory_gib=0.5)
NUM_PLACES = 2 * CONFIG.max_jobs
"""Jobs that hold memory; half of them are decoded at a time."""
SETTINGS = LearnSettings(loss=Dppo(), optim=AdamW(lr=1e-3))


@pytest.fixture
def path(bases: dict[str, Path], tmp_path: Path) -> Iterator[str]:
    """Where a server listens."""
    path = str(tmp_path / "cpu.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    server = StackServer(listener, bases=bases, device="cpu", config=CONFIG, clock=SystemClock())
    stop, stopped = socket.socketpair()
    thread = threading.Thread(target=server.run, args=(stopped,))
    thread.start()
    yield path
    stop.close()
    thread.join()
    server.close()
    stopped.close()


def test_what_a_broken_connection_still_asks_for_is_not_done(path: str) -> None:
    ask = wire.encode(wire.AskRoom(base="micro"))
    join = wire.encode(wire.Join(base="micro", settings=SETTINGS.model_dump_json()))
    with socket.socket(socket.AF_UNIX) as hasty:
        hasty.connect(path)
        hasty.sendall(ask + join)
    with closing(StackJob(path, lambda: None)) as job:
        assert job.room("micro").num_jobs == 0


def test_a_device_whose_process_is_away_is_passed_over(path: str, tmp_path: Path) -> None:
    away = str(tmp_path / "away.sock")
    with closing(Stacks(sockets=(away, path)).join("micro", SETTINGS, lambda: None)) as job:
        assert job.room("micro").num_jobs == 1
    with pytest.raises(LearnerError, match=r"away\.sock cannot be reached"):
        Stacks(sockets=(away,)).join("micro", SETTINGS, lambda: None)


def test_a_job_that_gives_up_waiting_for_a_place_leaves_the_stack(path: str) -> None:
    class OverError(Exception):
        """The job's time is over."""

    def join(check: Callable[[], None]) -> StackJob:
        return Stacks(sockets=(path,)).join("micro", SETTINGS, check)

    def count_down() -> None:
        if not checks.pop():
            raise OverError

    with ExitStack() as stack:
        job = stack.enter_context(closing(join(lambda: None)))
        others = [stack.enter_context(closing(join(lambda: None))) for _ in range(NUM_PLACES - 1)]
        checks = [False, True]  # over while it waits for its place, not before
        with pytest.raises(OverError) as caught:
            join(count_down)
        while job.room("micro").num_jobs > 1 + len(others):
            pass  # the server sees the end of a connection when it looks
        assert caught.tb is not None  # which holds on to all that was open


def test_a_model_that_cannot_be_written_is_told_in_the_words_of_the_system(
    path: str, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").mkdir()
    stacks = Stacks(sockets=(path,))
    with (
        closing(stacks.join("micro", SETTINGS, lambda: None)) as job,
        pytest.raises(JobFailedError, match=r"model\.safetensors cannot be written") as caught,
    ):
        job.save(str(tmp_path))
    assert caught.value.reason == "stack.disk"
    with closing(stacks.join("micro", SETTINGS, lambda: None)) as job:
        assert job.room("micro").num_jobs == 1
        assert job.save(str(tmp_path / "elsewhere")).is_finite


@pytest.mark.long
def test_scorer_waits_for_a_stack_that_says_nothing_until_its_own_time_is_over(
    bases: dict[str, Path], secret_path: Path, tmp_path: Path
) -> None:
    silent = str(tmp_path / "silent.sock")
    scoring = Scoring(EvalSecret.load_or_create(secret_path), bases, [silent])
    request = ScoreRequest(
        model_folder=str(bases["micro"]),
        base="micro",
        family=FAMILY,
        split="b",
        n=2,
        wall_s=0.01,
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(silent)
        listener.listen()
        with pytest.raises(JobFailedError, match=r"scorer\.start_timeout"):
            scoring.ready(0.01)
        with pytest.raises(JobFailedError, match=r"scorer\.timeout"):
            scoring.score(request)


def test_a_model_too_large_for_a_message_says_what_to_change(path: str) -> None:
    large = np.broadcast_to(np.float32(0), (2**30,))  # takes no memory
    with pytest.raises(ConfigError, match=r"4294967296 bytes.*inner\.trainer"):
        Stacks(sockets=(path,)).join_weights("micro", large, lambda: None)
