"""A `RolloutEnv` whose code runs in a jailed child: every call has a deadline, every fault a code.

The child is expected to lie, hang, flood and die; whatever it does becomes a `JailError` with a
reason code and the end of its whole process tree.

Reason codes: `jail.start`, `env.deadline`, `env.exited`, `env.protocol`, `env.output_flood`,
`env.changed_row`, `env.leak`, `env.request`, `env.closed`, and those of the worker's own faults (`env.import`, `env.config`, `env.rows`, ...).
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Final, Literal, Protocol, TypeVar

from nestling.core.clock import Clock, SystemClock
from nestling.core.errors import ConfigError, JailError
from nestling.jobs import env_protocol as wire
from nestling.jobs.jail import Jail, JailedProcess, JailLimits, wait_readable
from nestling.jobs.jail_runtime import JAIL_JOB_DIR
from nestling.jobs.rollout_env import (
    CallRequest,
    FinalRequest,
    RolloutStart,
    Row,
    ScoreRecord,
)

__all__ = ["EnvStarter", "JailedEnv", "RowCheck", "open_env"]

R = TypeVar("R", bound=wire.Reply)
RowCheck = Callable[[Sequence[Row]], str | None]
"""What is wrong with rows that were just fetched; None when nothing is."""

MAX_CALLS_PER_FRAME: Final = 256
MAX_TEXT_CHARS: Final = 200_000
MAX_ROWS_CHARS: Final = 64_000_000
LOG_TAIL_BYTES: Final = 16 * 1024
_READ_BYTES: Final = 1 << 16


class EnvStarter(Protocol):
    """Another way to start the worker than a cold jail: the zygote."""

    def start_worker(
        self, *, job_dir: Path, limits: JailLimits, request_fd: int, reply_fd: int, log_fd: int
    ) -> JailedProcess:
        """Start a worker that serves `job_dir` on these descriptors.

        Raises:
            JailError: it cannot be started.
        """
        ...


def open_env(
    job: Path | Mapping[str, bytes],
    public_tools: Mapping[str, bytes],
    limits: JailLimits,
    *,
    jail: Jail,
    starter: EnvStarter | None = None,
    env_args: Mapping[str, Any] | None = None,
    check_rows: RowCheck | None = None,
    clock: Clock | None = None,
) -> JailedEnv:
    """Start the job's environment and import its package.

    `job` is a folder or its files by relative path; `public_tools` are the files of the package
    `tools`, which replace any the job brings. `env_args` are the `[env]` values of the manifest.
    `starter` (a zygote) makes the worker start warm; without it Python imports everything anew.
    `check_rows` sees the rows each time they are fetched: a job may serve others in training than
    in the probe. What it objects to is an `env.leak` fault.

    Raises:
        JailError: with a reason code; `env.import` and `env.config` are faults of the package.
        ConfigError: a file name is not a plain relative path.
    """
    files = _read_folder(job) if isinstance(job, Path) else job
    env = JailedEnv(
        _job_files(files, public_tools),
        limits,
        jail=jail,
        starter=starter,
        check_rows=check_rows,
        clock=clock or SystemClock(),
    )
    try:
        env.load(dict(env_args or {}))
    except BaseException:
        env.close()
        raise
    return env


class JailedEnv:
    """The trainer's end of the pipe; made by `open_env`, used from one thread, a context manager."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        limits: JailLimits,
        *,
        jail: Jail,
        starter: EnvStarter | None,
        check_rows: RowCheck | None,
        clock: Clock,
    ) -> None:
        self._check_rows = check_rows
        self._limits = limits
        self._clock = clock
        self._log = bytearray()
        self._log_seen = 0
        self._shown: dict[int, int] = {}
        self._folder = _write_job(files)
        request_read, self._request_fd = os.pipe()
        self._reply_fd, reply_write = os.pipe()
        self._log_fd, log_write = os.pipe()
        self._process: JailedProcess | None = None
        for fd in (self._request_fd, self._reply_fd, self._log_fd):
            os.set_blocking(fd, False)
        try:
            if starter is None:
                inside = str(self._folder) if jail.unsafe else JAIL_JOB_DIR
                self._process = jail.start(
                    "nestling.jobs.env_worker",
                    [str(request_read), str(reply_write), inside],
                    job_dir=self._folder,
                    limits=limits,
                    keep_fds=(request_read, reply_write),
                    log_fd=log_write,
                )
            else:
                self._process = starter.start_worker(
                    job_dir=self._folder,
                    limits=limits,
                    request_fd=request_read,
                    reply_fd=reply_write,
                    log_fd=log_write,
                )
        except BaseException as e:
            for fd in (request_read, reply_write, log_write):
                os.close(fd)
            tail = self._drain_to_end() if isinstance(e, JailError) else ""
            self._release()
            if isinstance(e, JailError) and tail:
                raise JailError(e.reason, f"{e.detail}; it said: {tail}") from e
            raise
        for fd in (request_read, reply_write, log_write):
            os.close(fd)
        self._isolation: Literal["none", "namespaces", "namespaces+cgroup"] = "none"
        if not jail.unsafe:
            grouped = self._process.cgroup is not None
            self._isolation = "namespaces+cgroup" if grouped else "namespaces"
        self._end_s = clock.monotonic() + limits.life_s  # a zygote may still have been importing

    def load(self, env_args: dict[str, Any]) -> None:
        """Import the package; done by `open_env`."""
        self._ask(wire.Load(env_args=env_args), wire.Loaded, self._limits.load_s)

    def rows(self, limit: int) -> list[Row]:
        """See `RolloutEnv`; fetched in pages."""
        rows: list[Row] = []
        chars = 0
        while len(rows) < limit:
            request = wire.Rows(start=len(rows), limit=limit - len(rows))
            reply = self._ask(request, wire.RowsReply)
            for frame in reply.rows:
                if frame.index != len(rows) or len(rows) >= limit:
                    raise self._fault("env.protocol", f"row {frame.index} out of order")
                chars += len(frame.system_prompt) + len(frame.prompt) + len(frame.data_json)
                if chars > MAX_ROWS_CHARS:
                    raise self._fault("env.rows", f"rows of more than {MAX_ROWS_CHARS} characters")
                self._check_same(frame.index, frame.system_prompt, frame.prompt)
                rows.append(
                    Row(
                        index=frame.index,
                        system_prompt=frame.system_prompt,
                        prompt=frame.prompt,
                        data_json=frame.data_json,
                    )
                )
            if not reply.more or not reply.rows:
                break
        wrong = None if self._check_rows is None else self._check_rows(rows)
        if wrong is not None:
            raise self._fault("env.leak", wrong)
        return rows

    def tool_schemas(self) -> list[dict[str, Any]]:
        """See `RolloutEnv`."""
        return self._ask(wire.Tools(), wire.ToolsReply).schemas

    def reset(self, rows: Sequence[int]) -> list[RolloutStart]:
        """See `RolloutEnv`."""
        starts: list[RolloutStart] = []
        for batch in _batches(rows):
            reply = self._ask(wire.Reset(rows=list(batch)), wire.Started)
            self._check_count(len(reply.starts), len(batch))
            for index, frame in zip(batch, reply.starts, strict=True):
                self._check_same(index, frame.system_prompt, frame.prompt)
            starts += [
                RolloutStart(
                    rollout_id=frame.rollout_id,
                    system_prompt=frame.system_prompt,
                    prompt=frame.prompt,
                )
                for frame in reply.starts
            ]
        if len({start.rollout_id for start in starts}) != len(starts):
            raise self._fault("env.protocol", "two rollouts got the same id")
        return starts

    def step(self, calls: Sequence[CallRequest]) -> list[str | None]:
        """See `RolloutEnv`."""
        answers: list[str | None] = []
        for batch in _batches(calls):
            reply = self._ask(wire.Step(calls=[_call(c) for c in batch]), wire.StepReply)
            self._check_count(len(reply.answers), len(batch))
            answers += reply.answers
        return answers

    def score(self, finals: Sequence[FinalRequest]) -> list[ScoreRecord]:
        """See `RolloutEnv`."""
        records: list[ScoreRecord] = []
        for batch in _batches(finals):
            reply = self._ask(wire.Score(finals=[_final(f) for f in batch]), wire.ScoreReply)
            self._check_count(len(reply.records), len(batch))
            records += [
                ScoreRecord(
                    reward=0.0 if frame.error is not None else frame.reward,
                    rewards=frame.rewards,
                    metrics=frame.metrics,
                    error=None if frame.error is None else _printable(frame.error),
                )
                for frame in reply.records
            ]
        return records

    def close(self) -> None:
        """Kill the worker's tree and remove its files; may be called twice."""
        self._release()

    def log_tail(self) -> str:
        """The last 16 KiB the worker wrote to its standard output and error."""
        return self._log.decode("utf-8", "replace").strip()

    @property
    def isolation(self) -> Literal["none", "namespaces", "namespaces+cgroup"]:
        """What holds the worker; for the run's record."""
        return self._isolation

    def __enter__(self) -> JailedEnv:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, request: wire.Request, expected: type[R], seconds: float | None = None) -> R:
        if self._process is None:
            raise JailError("env.closed", "the environment is closed")
        try:
            frame = wire.encode(request)
            wire.decode_request(frame[wire.HEADER_BYTES :])
        except wire.ProtocolError as e:  # our side: refuse before it is sent, the worker lives on
            raise JailError("env.request", str(e)) from e
        deadline = min(self._clock.monotonic() + (seconds or self._limits.call_s), self._end_s)
        try:
            self._send(frame, deadline)
            header = self._receive(wire.HEADER_BYTES, deadline)
            reply = wire.decode_reply(self._receive(wire.frame_length(header), deadline))
        except wire.ProtocolError as e:
            raise self._fault("env.protocol", str(e)) from e
        except KeyboardInterrupt:
            self._release()
            raise
        if isinstance(reply, wire.Fault):
            raise self._fault(_own_fault(reply.code), reply.detail)
        if not isinstance(reply, expected):
            wanted = expected.__name__
            raise self._fault("env.protocol", f"a {type(reply).__name__}; expected {wanted}")
        return reply

    def _check_same(self, index: int, system_prompt: str, prompt: str) -> None:
        """A row is what it was when first seen: what was checked is what is trained on."""
        shown = hash((system_prompt, prompt))
        if self._shown.setdefault(index, shown) != shown:
            raise self._fault("env.changed_row", f"row {index} has another prompt than before")

    def _check_count(self, got: int, expected: int) -> None:
        if got != expected:
            raise self._fault("env.protocol", f"{got} answers to {expected} requests")

    def _send(self, frame: bytes, deadline: float) -> None:
        view = memoryview(frame)
        while view:
            if self._wait(self._request_fd, select.POLLOUT, deadline):
                try:
                    view = view[os.write(self._request_fd, view) :]
                except BrokenPipeError:
                    raise self._gone() from None

    def _receive(self, count: int, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < count:
            if self._wait(self._reply_fd, select.POLLIN, deadline):
                chunk = os.read(self._reply_fd, min(count - len(received), _READ_BYTES))
                if not chunk:
                    raise self._gone()
                received += chunk
        return bytes(received)

    def _wait(self, fd: int, event: int, deadline: float) -> bool:
        """Wait for one descriptor, keeping the log pipe empty meanwhile; False to ask again."""
        left = deadline - self._clock.monotonic()
        if left <= 0:
            limit = "the environment" if deadline == self._end_s else "the call"
            raise self._fault("env.deadline", f"no answer within the wall-clock limit of {limit}")
        poll = select.poll()
        poll.register(fd, event)
        if self._log_fd >= 0:
            poll.register(self._log_fd, select.POLLIN)
        ready = dict(poll.poll(left * 1000))
        if self._log_fd in ready:
            self._read_log()
        return fd in ready

    def _read_log(self) -> bool:
        """Take what is in the log pipe; False at its end."""
        try:
            chunk = os.read(self._log_fd, _READ_BYTES)
        except BlockingIOError:
            return True
        if not chunk:
            os.close(self._log_fd)
            self._log_fd = -1
            return False
        self._log += chunk
        del self._log[:-LOG_TAIL_BYTES]
        self._log_seen += len(chunk)
        if self._log_seen > self._limits.log_bytes:
            raise self._fault(
                "env.output_flood", f"more than {self._limits.log_bytes} bytes of output"
            )
        return True

    def _gone(self) -> JailError:
        """The pipe ended without a fault frame: exit, kill, or a limit of the jail."""
        return self._fault("env.exited", "the environment process ended without an answer")

    def _fault(self, code: str, detail: str) -> JailError:
        """The error to raise; the tree is dead when this returns."""
        if self._process is not None:
            self._process.kill()
        if code != "env.output_flood":
            self._drain_to_end()
        tail = self.log_tail()[-1000:]
        self._release()
        return JailError(code, _printable(f"{detail}; its last output: {tail}" if tail else detail))

    def _drain_to_end(self) -> str:
        with contextlib.suppress(OSError):
            for _ in range(64):
                if self._log_fd < 0 or not wait_readable(self._log_fd, 0):
                    break
                chunk = os.read(self._log_fd, _READ_BYTES)
                if not chunk:
                    break
                self._log += chunk
                del self._log[:-LOG_TAIL_BYTES]
        return self.log_tail()[-1000:]

    def _release(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
        for name in ("_request_fd", "_reply_fd", "_log_fd"):
            fd = getattr(self, name)
            if fd >= 0:
                setattr(self, name, -1)
                os.close(fd)
        shutil.rmtree(self._folder, ignore_errors=True)


def _own_fault(code: str) -> str:
    """A worker speaks for its job alone: it cannot blame the jail or the machine for its end."""
    blames_us = not code.startswith("env.") or code.startswith("env.jail")
    return "env.crashed" if blames_us else code


def _printable(text: str) -> str:
    """Without control characters, which could rewrite the terminal of whoever reads it."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def _batches(items: Sequence[Any]) -> list[Sequence[Any]]:
    size = MAX_CALLS_PER_FRAME
    return [items[start : start + size] for start in range(0, len(items), size)]


def _call(call: CallRequest) -> wire.CallFrame:
    return wire.CallFrame(
        rollout_id=call.rollout_id,
        text=call.text[:MAX_TEXT_CHARS],
        name=call.name[:256],
        arguments=call.arguments,
        malformed=None if call.malformed is None else call.malformed[:1000],
        prompt_tokens=call.prompt_tokens,
        completion_tokens=call.completion_tokens,
    )


def _final(final: FinalRequest) -> wire.FinalFrame:
    return wire.FinalFrame(
        rollout_id=final.rollout_id,
        text=final.text[:MAX_TEXT_CHARS],
        stop=final.stop,
        prompt_tokens=final.prompt_tokens,
        completion_tokens=final.completion_tokens,
    )


def _job_files(files: Mapping[str, bytes], public_tools: Mapping[str, bytes]) -> dict[str, bytes]:
    job = {name: content for name, content in files.items() if name.split("/")[0] != "tools"}
    job |= {f"tools/{name}": content for name, content in public_tools.items()}
    for name in job:
        path = PurePosixPath(name)
        if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
            raise ConfigError(f"job file {name!r}; expected a relative path without ..")
    return job


def _read_folder(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def _write_job(files: Mapping[str, bytes]) -> Path:
    """The files in a folder that the jail's user may read.

    Raises:
        JailError: the system refuses, for example on a full disk.
    """
    folder: Path | None = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="nestling-job-"))
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)  # the jail's user owns nothing
    except BaseException as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise JailError(
            "jail.start",
            f"{error.filename or tempfile.gettempdir()} cannot be written: {error.strerror or error}; expected room "
            "for the job's files; free some",
        ) from error
    return folder
