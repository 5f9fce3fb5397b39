"""A warm worker: takes one job at a time from its controller and answers with the result.

    python -m nestling.fleet.worker --handlers package.module:make_handlers --settings '{...}'

Work comes through a pipe from the controller rather than from the run store. So the controller is
the store's only writer and shares one fsync among all workers, a worker holds no database handle
that hostile work could reach, and the same loop serves a worker on another machine, where there is
no shared file. The price: a controller that dies takes its workers with it; their jobs are done
again by the next one. `serve` knows only `Inbox` and `Outbox`, not the pipe.

The main thread runs handlers. One thread reads, and kills the whole process group when the
controller is gone; one thread sends heartbeats. Whatever libraries print goes to the log.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol

from nestling.core.errors import ConfigError, JobFailedError, NestlingError
from nestling.fleet.messages import (
    HEADER_BYTES,
    Beat,
    Done,
    Failed,
    FromWorker,
    Progress,
    Ready,
    Stage,
    Stop,
    ToWorker,
    Work,
    decode_to_worker,
    encode,
    frame_length,
)

__all__ = ["Handler", "HandlerContext", "Handlers", "MakeHandlers", "main", "serve"]

_PR_SET_PDEATHSIG = 1
_MAX_DETAIL_CHARS = 2000


class HandlerContext:
    """What a handler may use of its worker."""

    def __init__(self, work: Work, send: Callable[[FromWorker], None]) -> None:
        self.job_id = work.job_id
        self._token = work.token
        self._send = send

    def stage(self, name: str, limit_s: float) -> None:
        """Begin a stage; the controller kills this worker when it takes longer than `limit_s`."""
        self._send(Stage(token=self._token, name=name, limit_s=limit_s))

    def progress(self, data: Mapping[str, Any]) -> None:
        """Show something on the way; JSON."""
        self._send(Progress(token=self._token, data=dict(data)))


Handler = Callable[[dict[str, Any], HandlerContext], Any]
"""Payload and context to a JSON result. `JobFailedError` ends the job; anything else is tried again."""

Handlers = Mapping[str, Handler]
"""By kind of job."""

MakeHandlers = Callable[[dict[str, Any]], Handlers]
"""Called once per worker with the settings; the place for heavy imports and model loading."""


class Inbox(Protocol):
    """Where work comes from."""

    def next(self) -> ToWorker:
        """The next message; waits."""
        ...


Outbox = Callable[[FromWorker], None]
"""Sends a message; may be called from any thread."""


def serve(inbox: Inbox, send: Outbox, handlers: Handlers, *, beat_s: float) -> None:
    """Do jobs until told to stop."""
    send(Ready(pid=os.getpid()))
    while not isinstance(work := inbox.next(), Stop):
        with _heartbeats(work.token, send, beat_s):
            answer = _answer(work, handlers, send)
        send(answer)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="nestling.fleet.worker", description="A fleet worker.")
    parser.add_argument("--handlers", required=True, help="module:function that makes handlers")
    parser.add_argument("--settings", default="{}", help="JSON for that function")
    parser.add_argument("--beat-s", type=float, default=5.0, help="seconds between heartbeats")
    parser.add_argument("--parent", type=int, default=0, help="process id of the controller")
    parser.add_argument("--cores", default="", help="cores to run on, as 0,1; empty: all")
    options = parser.parse_args(arguments)
    if options.cores:
        # Before anything starts threads, so that all of them and all children are there.
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    _die_with(options.parent)
    requests, answers = _take_pipes()
    inbox = _PipeInbox(requests)
    make = load_handlers(options.handlers)
    handlers = make(json.loads(options.settings))
    serve(inbox, _PipeOutbox(answers), handlers, beat_s=options.beat_s)
    return 0


def load_handlers(path: str) -> MakeHandlers:
    """The function named `module:function`; `ConfigError` when there is none."""
    module_name, _, name = path.partition(":")
    try:
        make = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"handlers {path!r} cannot be loaded: {error}; expected module:function"
        ) from error
    if not callable(make):
        raise ConfigError(f"handlers {path!r} is not a function; expected module:function")
    return make  # type: ignore[no-any-return]


def _answer(work: Work, handlers: Handlers, send: Outbox) -> Done | Failed:
    handler = handlers.get(work.kind)
    if handler is None:
        return Failed(
            token=work.token,
            reason="worker.unknown_kind",
            detail=f"kind {work.kind!r}; this worker does {', '.join(sorted(handlers))}",
            retry=False,
        )
    try:
        result = handler(work.payload, HandlerContext(work, send))
        encode(done := Done(token=work.token, result=result))
    except JobFailedError as error:
        return Failed(token=work.token, reason=error.reason, detail=error.detail, retry=False)
    except ConfigError as error:
        return Failed(token=work.token, reason="config", detail=str(error), retry=False)
    except Exception as error:  # noqa: BLE001 (a worker outlives whatever its handler raises)
        traceback.print_exc(file=sys.stderr)
        detail = str(error) if isinstance(error, NestlingError) else _last_lines()
        return Failed(
            token=work.token,
            reason="worker.exception",
            detail=detail[-_MAX_DETAIL_CHARS:],
            retry=True,
        )
    return done


def _last_lines() -> str:
    return "".join(traceback.format_exc(limit=-3)).strip()


@contextmanager
def _heartbeats(token: str, send: Outbox, beat_s: float) -> Iterator[None]:
    """Beat in a thread: the handler may be inside one long call of native code."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(beat_s):
            send(Beat(token=token))

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _PipeInbox:
    """Reads in a thread, so that the end of the controller is seen during a job."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._messages: queue.Queue[ToWorker] = queue.Queue()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def next(self) -> ToWorker:
        return self._messages.get()

    def _read(self) -> None:
        try:
            while len(header := self._stream.read(HEADER_BYTES)) == HEADER_BYTES:
                body = self._stream.read(frame_length(header))
                self._messages.put(decode_to_worker(body))
        finally:
            _kill_group()


class _PipeOutbox:
    """Writes whole frames from any thread."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def __call__(self, message: FromWorker) -> None:
        frame = encode(message)
        try:
            with self._lock:
                self._stream.write(frame)
                self._stream.flush()
        except BrokenPipeError:
            _kill_group()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep stdin and stdout for messages; print goes to stderr and reading stdin gives nothing.

    The copies are not inherited, so no child can speak for this worker or hold the pipe open.
    """
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return os.fdopen(requests, "rb"), os.fdopen(answers, "wb")


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the controller dies (Linux only)."""
    if sys.platform != "linux" or parent == 0:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def _kill_group() -> None:
    """End this worker and what it started; it leads its own process group."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
