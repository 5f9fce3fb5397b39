"""A machine room in this process: for one job, one episode, one benchmark, or as one of its worker processes."""

from __future__ import annotations

import asyncio
import atexit
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from nestling.config import RunConfig
from nestling.families.splits import EvalSecret
from nestling.jobs.bundle import Bundle
from nestling.jobs.outcome import Outcome, StepRecord
from nestling.jobs.probe_report import ProbeReport
from nestling.wiring.rooms import Room, running_stacks
from nestling.wiring.state import SECRET_FILE, make_state_folder

__all__ = ["RoomRunner", "open_worker_room", "room_here", "worker_room"]

_T = TypeVar("_T")


@contextmanager
def room_here(config: RunConfig, models: Path | None = None) -> Iterator[Room]:
    """A room that this very thread uses; an interruption reaches it at once.

    Args:
        config: what is trained and scored; its `unsafe_no_jail` decides about the jail.
        models: where trained models are kept; None: nowhere.

    Raises:
        ConfigError: the jail is missing, or the state folder cannot be made.
        ModelError: the base models are missing.
    """
    state = make_state_folder()
    EvalSecret.load_or_create(state / SECRET_FILE)
    with (
        tempfile.TemporaryDirectory(prefix="nestling-room-") as scratch,
        running_stacks(config, Path(scratch) / "logs") as stacks,
    ):
        room = Room(config, state, models or Path(scratch), stacks)
        try:
            yield room
        finally:
            room.close()


_worker_room: Room | None = None


def open_worker_room(config: RunConfig, scratch: str, stacks: tuple[str, ...]) -> None:
    """Called once in each worker process of a benchmark: a room for all jobs that it is given.

    Ctrl-C is left to the parent. SIGTERM leaves the process as `SystemExit` would, so that the room closes.
    """
    global _worker_room
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    _worker_room = Room(config, make_state_folder(), Path(scratch) / "models", stacks)
    atexit.register(_close_worker_room)


def worker_room() -> Room:
    """The one that `open_worker_room` opened in this process."""
    assert _worker_room is not None
    return _worker_room


def _close_worker_room() -> None:
    """SIGTERM now just ends the process: raised while Python exits, it would be told as an error."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    worker_room().close()


class RoomRunner:
    """Satisfies what an episode needs of a job runner, over one room; close it before the room."""

    def __init__(self, room: Room, log: Callable[[StepRecord], None]) -> None:
        self._room = room
        self._log = log
        # One thread for all work: a jail dies with the thread that started it.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="room")

    async def check(self, bundle: Bundle, family: str) -> ProbeReport:
        """Run the probe."""
        return await self._call(lambda: self._room.check(bundle, family))

    async def run(self, bundle: Bundle, family: str) -> Outcome:
        """Train and score."""
        return await self._call(lambda: self._room.run(bundle, family, self._log))

    async def baselines(self, family: str) -> dict[str, float]:
        """Untrained score of every base on hidden set A."""
        return await self._call(lambda: self._room.baselines(family))

    def close(self) -> None:
        """Wait for what runs and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _call(self, work: Callable[[], _T]) -> _T:
        return await asyncio.wrap_future(self._thread.submit(work))
