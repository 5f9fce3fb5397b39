"""Processes of a stack host that die, early and late; nothing here waits for one to serve again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from nestling.core.errors import ConfigError
from nestling.inner.stack_client import StackJob, Stacks
from nestling.inner.stack_config import StackConfig
from nestling.inner.stack_host import StackHost

CONFIG = StackConfig(max_jobs=1, rows_per_job=4, max_len=128, memory_gib=0.5)


class HandClock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def make_host(bases: dict[str, Path], tmp_path: Path) -> Callable[..., StackHost]:
    def make(**more: object) -> StackHost:
        return StackHost(bases=bases, devices=("cpu",), config=CONFIG, logs=tmp_path, **more)

    return make


@pytest.mark.long
def test_a_stack_that_dies_now_and_then_is_always_started_again_and_one_that_keeps_dying_is_not(
    make_host: Callable[..., StackHost], caplog: pytest.LogCaptureFixture
) -> None:
    clock = HandClock()
    with make_host(clock=clock) as host:
        for life_s in (3600.0,) * 8 + (1.0,) * 5:
            (pid,) = host.process_ids()
            clock.seconds += life_s
            os.kill(pid, signal.SIGKILL)
            while host.process_ids() == (pid,):
                os.sched_yield()
        assert "keeps dying" not in caplog.text
        os.kill(host.process_ids()[0], signal.SIGKILL)
        while "keeps dying" not in caplog.text:
            os.sched_yield()


def test_a_stack_that_does_not_get_ready_in_time_says_so_and_is_ended(
    make_host: Callable[..., StackHost],
) -> None:
    host = make_host(start_wall_s=0.001)
    with pytest.raises(ConfigError, match=r"cpu is not ready after 0\.001 s.*stack-cpu\.log"), host:
        pass
    for pid in host.process_ids():
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.long
def test_a_device_may_have_several_processes_that_share_its_memory(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    config = CONFIG.model_copy(update={"processes": 2})
    with StackHost(bases=bases, devices=("cpu",), config=config, logs=tmp_path) as host:
        assert len(set(host.sockets)) == len(set(host.process_ids())) == 2
        fingerprint = Stacks(sockets=host.sockets).fingerprint(_no_check)
        base = next(iter(bases))
        rooms = []
        for path in host.sockets:
            job = StackJob(path, _no_check)
            rooms.append(job.room(base))
            job.close()
        assert {room.process_id for room in rooms} == set(host.process_ids())
        assert {room.fingerprint for room in rooms} == {fingerprint}
    assert {path.name for path in tmp_path.iterdir()} == {"stack-cpu-0.log", "stack-cpu-1.log"}


def _no_check() -> None:
    """Nothing ends these jobs early."""
