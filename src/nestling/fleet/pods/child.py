"""The worker process of a pod and its folder: started, spoken to, wiped and ended."""

from __future__ import annotations

import asyncio
import os
import shutil
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from nestling.core.rundir import ArtifactStore, write_atomic
from nestling.fleet import process_tree
from nestling.fleet.messages import HEADER_BYTES, frame_length
from nestling.fleet.pods.wire import WorkSpec
from nestling.fleet.slots import thread_settings
from nestling.fleet.worker_process import last_words, worker_command, worker_environment

__all__ = ["PodChild", "PodFolder"]

_STOP_S = 10.0


class PodFolder:
    """Everything a pod keeps on disk, for its user alone."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run = root / "run"
        self.state = root / "state"
        self.log = root / "worker.log"
        self.artifacts = ArtifactStore(self.run / "artifacts")
        self._tmp = root / "tmp"
        self._home = root / "home"
        self._kept: set[Path] = set()

    def make(self, private: Mapping[str, bytes]) -> None:
        """Make the folders and the secret files of the state folder."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (self.run, self.run / "artifacts", self.state, self._tmp, self._home):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, data in private.items():
            write_atomic(self.state / Path(name).name, data)

    def environment(self) -> dict[str, str]:
        """Places that a program may write to."""
        return {"HOME": str(self._home), "TMPDIR": str(self._tmp)}

    def keep_present(self) -> None:
        """What is there now belongs to the worker, not to a job."""
        self._kept = set(self._entries())

    def wipe(self) -> None:
        """Remove what a job brought or left: its bundle, its models, its temporary files."""
        for path in self._entries():
            if path not in self._kept:
                _remove(path)

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _entries(self) -> list[Path]:
        places = (self.run, self.run / "artifacts", self._tmp, self._home)
        return [path for place in places if place.is_dir() for path in place.iterdir()]


class PodChild:
    """One start of the worker process."""

    def __init__(self, generation: int, process: Process, marker: str, folder: PodFolder) -> None:
        self.generation = generation
        self.is_ready = False
        self.is_busy = False
        self.is_gone = False
        self._process = process
        self._marker = marker
        self._folder = folder

    @classmethod
    async def start(cls, generation: int, name: str, spec: WorkSpec, folder: PodFolder) -> PodChild:
        """Start it; its settings get the folders of this pod."""
        marker = f"pod/{name}/{os.getpid()}/{generation}"
        settings = spec.settings | {"run": str(folder.run), "state": str(folder.state)}
        paths = {key: os.environ[key] for key in ("PYTHONPATH",) if key in os.environ}
        environment = worker_environment(
            marker, thread_settings(1), folder.environment(), paths, ours=False
        )
        with folder.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *worker_command(spec.handlers, settings, spec.beat_s),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        return cls(generation, process, marker, folder)

    async def send(self, body: bytes) -> None:
        """Hand a message over; one that is gone says so itself."""
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            stdin.write(len(body).to_bytes(HEADER_BYTES, "big") + body)
            await stdin.drain()

    async def receive(self) -> bytes | None:
        """The next message; None when the process is gone."""
        stdout = self._process.stdout
        assert stdout is not None
        try:
            header = await stdout.readexactly(HEADER_BYTES)
            return await stdout.readexactly(frame_length(header))
        except asyncio.IncompleteReadError:
            return None

    async def stopped(self) -> None:
        """Wait a while for it to end by itself."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()

    async def end(self) -> None:
        """End it with everything it started; one in an uninterruptible call is left after a while."""
        pid = self._process.pid
        await asyncio.to_thread(process_tree.end_tree, pid, self._marker)
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self.stopped()

    def last_words(self) -> str:
        """The end of its log."""
        return last_words(self._folder.log)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
