"""A scorer process on this machine, kept warm, with deadlines and one restart per request."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, TypeVar

from pydantic import ValidationError

from nestling.core.clock import Clock, SystemClock
from nestling.core.errors import ConfigError, JobFailedError, LearnerError, NestlingError
from nestling.families.splits import HiddenSplit
from nestling.inner.openai_config import OpenAiConfig
from nestling.inner.own_environment import own_environment
from nestling.inner.score_wire import (
    MAX_LINE_BYTES,
    REPLY,
    STACK_LOST,
    Ready,
    Refused,
    ScoreReply,
    ScoreRequest,
    Start,
)
from nestling.inner.scorer import Score

__all__ = ["EmbeddedScorer"]

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply")

_OF_SERVERS: Final = ("HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT")
"""What a server that the scorer starts may need besides; no key either."""
_END_S: Final = 10.0
"""From the end of its pipe to the end of the process."""


class EmbeddedScorer:
    """Owns one `nestling.inner.score_worker`; safe to call from several threads, one at a time."""

    def __init__(
        self,
        *,
        secret_path: Path,
        bases: Mapping[str, Path],
        stacks: tuple[str, ...] = (),
        device: str = "cpu",
        start_wall_s: float = 120.0,
        score_wall_s: float = 120.0,
        clock: Clock | None = None,
        openai: OpenAiConfig | None = None,
    ) -> None:
        """`stacks`: sockets of stack processes, which sample in the scorer's stead; `openai`: a server that does."""
        self._start_message = Start(
            secret_path=str(secret_path.absolute()),
            bases={name: str(folder.absolute()) for name, folder in bases.items()},
            device=device,
            stacks=stacks,
            openai=openai,
            wall_s=start_wall_s,
        )
        self._passed_on = () if openai is None else (*_OF_SERVERS, openai.key_env)
        self._start_wall_s = start_wall_s
        self._score_wall_s = score_wall_s
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()  # guards the process and its pipes
        self._process: _Process | None = None

    def start(self) -> None:
        """Begin loading in the background; a failure shows at the first question."""
        with self._lock, contextlib.suppress(_DiedError):
            self._running()

    def fingerprint(self) -> str:
        """Waits until the process is ready."""
        with self._lock:
            return self._retried(self._ready).fingerprint

    def commitment(self, split: HiddenSplit) -> str:
        """Waits until the process is ready."""
        with self._lock:
            return self._retried(self._ready).commitments[split]

    def score(
        self, model_folder: Path, *, base: str, family: str, split: HiddenSplit, n: int
    ) -> Score:
        """See `Scorer.score`; a death of the process is retried once on a new one."""
        request = ScoreRequest(
            model_folder=str(model_folder.absolute()),
            base=base,
            family=family,
            split=split,
            n=n,
            wall_s=self._score_wall_s,
        )
        with self._lock:
            reply = self._retried(lambda: self._ask(request))
        if isinstance(reply, Refused):
            raise _error_of(reply)
        if not isinstance(reply, ScoreReply) or len(reply.correct) != n:
            self.close()
            raise JobFailedError("scorer.protocol", f"unexpected reply of kind {reply.kind!r}")
        return Score(
            correct=reply.correct,
            base_digest=reply.base_digest,
            weights_hash=reply.weights_hash,
            delta_norm=reply.delta_norm,
            cpu_s=reply.cpu_s,
        )

    def process_id(self) -> int | None:
        """The running process, if any."""
        process = self._process
        return process.popen.pid if process is not None else None

    def close(self) -> None:
        """End the process at once."""
        with self._lock:
            self._stop()

    def _retried(self, ask: Callable[[], _Reply]) -> _Reply:
        """Scoring is repeatable, so one death is forgiven; a second one has a cause."""
        try:
            return ask()
        except _DiedError as error:
            _log.warning("scorer restarts: %s", error)
        try:
            return ask()
        except _DiedError as error:
            _log.warning("scorer died again: %s", error)
            raise JobFailedError(
                "scorer.died", "the scorer process ended twice on the same request"
            ) from error

    def _ask(self, request: ScoreRequest) -> Ready | ScoreReply | Refused:
        self._ready()
        process = self._running()
        try:
            process.send(request)
            return process.receive(self._clock, self._score_wall_s, "scorer.timeout")
        except (_DiedError, JobFailedError):
            self._stop()
            raise

    def _ready(self) -> Ready:
        process = self._running()
        if process.ready is None:
            try:
                reply = process.receive(self._clock, self._start_wall_s, "scorer.start_timeout")
            except (_DiedError, JobFailedError):
                self._stop()
                raise
            if not isinstance(reply, Ready):
                self._stop()
                if isinstance(reply, Refused):
                    raise _error_of(reply)
                raise JobFailedError("scorer.protocol", "the first reply is not `ready`")
            process.ready = reply
        return process.ready

    def _running(self) -> _Process:
        if self._process is not None and self._process.popen.poll() is not None:
            self._stop()
        if self._process is None:
            self._process = _Process(self._start_message, self._passed_on)
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None


def _error_of(reply: Refused) -> NestlingError:
    """A wrong set-up is the operator's to fix, a stack comes back, everything else is the job's."""
    if reply.reason == "scorer.config":
        return ConfigError(reply.detail)
    if reply.reason == STACK_LOST:
        return LearnerError(reply.detail)
    return JobFailedError(reply.reason, reply.detail)


class _DiedError(Exception):
    """The process ended while it owed a reply."""


class _Process:
    """One child process with its pipes."""

    def __init__(self, start_message: Start, passed_on: Sequence[str]) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in stop)
        # -P: the folder we happen to run in must not be able to replace a module.
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "nestling.inner.score_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=own_environment(*passed_on),
            bufsize=0,
        )
        self._buffer = bytearray()
        self.ready: Ready | None = None
        try:
            self.send(start_message)
        except _DiedError:
            self.stop()
            raise

    def send(self, message: Start | ScoreRequest) -> None:
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(message.model_dump_json().encode() + b"\n")
        except OSError as error:
            raise _DiedError(self._last_words()) from error

    def receive(
        self, clock: Clock, limit_s: float, timeout_reason: str
    ) -> Ready | ScoreReply | Refused:
        """The next reply; the caller stops the process on any error."""
        line = self._read_line(clock, limit_s, timeout_reason)
        try:
            return REPLY.validate_json(line)
        except ValidationError as error:
            raise JobFailedError("scorer.protocol", "a reply is not of the protocol") from error

    def _read_line(self, clock: Clock, limit_s: float, timeout_reason: str) -> bytes:
        assert self.popen.stdout is not None
        deadline = clock.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.popen.stdout, selectors.EVENT_READ)
            while (end := self._buffer.find(b"\n")) < 0:
                if len(self._buffer) > MAX_LINE_BYTES:
                    raise JobFailedError("scorer.protocol", "a reply is longer than allowed")
                left_s = deadline - clock.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    raise JobFailedError(timeout_reason, f"no reply within {limit_s:g} s")
                chunk = os.read(self.popen.stdout.fileno(), 65536)
                if not chunk:
                    raise _DiedError(self._last_words())
                self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def stop(self) -> None:
        """Kill and reap."""
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout, self._errors):
            if pipe is not None:
                pipe.close()

    def _last_words(self) -> str:
        """For our log alone: a traceback may quote a hidden item."""
        try:
            code = self.popen.wait(_END_S)
        except subprocess.TimeoutExpired:  # its pipe is closed, so it is of no use
            self.popen.kill()
            code = self.popen.wait()
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 2000))
        words = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"the scorer ended with code {code}" + (f": {words[-1]}" if words else "")
