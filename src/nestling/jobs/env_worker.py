"""The process in which agent code runs: serves one job over two pipes, then exits.

Started by `env_client` in a jail as `python -c BOOT` with this file and its few neighbours bound
into an otherwise empty `nestling` package, or forked inside the jail by the zygote.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from pathlib import Path
from typing import Final

import numpy

from nestling.core.errors import ConfigError, JailError
from nestling.jobs import env_protocol as wire
from nestling.jobs.rollout_env import CallRequest, FinalRequest
from nestling.jobs.verifiers_host import VerifiersHost, describe, load_taskset_from

__all__ = ["main", "serve"]

MAX_ROWS_PAGE: Final = 256
MAX_ROWS_PAGE_CHARS: Final = 1_000_000
"""Rows are sent in pages of about this size."""


def serve(request_fd: int, reply_fd: int, job_dir: Path) -> None:
    """Answer requests until end of file or the first fault.

    Whatever the job raises, exits included, becomes one `fault` frame and ends the worker.
    """
    host: VerifiersHost | None = None
    _seed_default_generators()
    while True:
        body = _read_frame(request_fd)
        if body is None:
            return
        try:
            request = wire.decode_request(body)
            if isinstance(request, wire.Load):
                host = VerifiersHost(load_taskset_from(job_dir, request.env_args))
                reply: wire.Reply = wire.Loaded()
            elif host is None:
                raise JailError("env.protocol", "the first request must be load")  # noqa: TRY301
            else:
                reply = _answer(host, request)
            frame = wire.encode(reply)
        except BaseException as e:  # noqa: BLE001 (SystemExit of agent code is a fault too)
            reply = _fault(e)
            frame = wire.encode(reply)
        _write_all(reply_fd, frame)
        if isinstance(reply, wire.Fault):
            return


def _seed_default_generators() -> None:
    """Same job, same numbers, in a cold worker and in a forked one."""
    random.seed(0)  # noqa: TID251 (the job's own default generator, not ours)
    numpy.random.seed(0)  # noqa: NPY002


def _answer(host: VerifiersHost, request: wire.Request) -> wire.Reply:
    match request:
        case wire.Rows(start=start, limit=limit):
            return _rows(host, start, limit)
        case wire.Tools():
            return wire.ToolsReply(schemas=host.tool_schemas())
        case wire.Reset(rows=rows):
            starts = [
                wire.StartFrame(
                    rollout_id=start.rollout_id,
                    system_prompt=start.system_prompt,
                    prompt=start.prompt,
                )
                for start in host.reset(rows)
            ]
            return wire.Started(starts=starts)
        case wire.Step(calls=calls):
            answers = host.step([_call(frame) for frame in calls])
            return wire.StepReply(answers=[_clean(answer) for answer in answers])
        case wire.Score(finals=finals):
            records = [
                wire.ScoreFrame(
                    reward=record.reward,
                    rewards=record.rewards,
                    metrics=record.metrics,
                    error=_clean(record.error),
                )
                for record in host.score([_final(frame) for frame in finals])
            ]
            return wire.ScoreReply(records=records)
        case _:
            raise JailError("env.protocol", f"unexpected {type(request).__name__}")


def _rows(host: VerifiersHost, start: int, limit: int) -> wire.RowsReply:
    frames: list[wire.RowFrame] = []
    chars = 0
    rows = host.rows(start + min(limit, MAX_ROWS_PAGE))[start:]
    for row in rows:
        frames.append(
            wire.RowFrame(
                index=row.index,
                system_prompt=row.system_prompt,
                prompt=row.prompt,
                data_json=row.data_json,
            )
        )
        chars += len(row.prompt) + len(row.system_prompt) + len(row.data_json)
        if chars >= MAX_ROWS_PAGE_CHARS:
            break
    more = len(frames) < len(rows) or len(frames) == MAX_ROWS_PAGE < limit
    return wire.RowsReply(rows=frames, more=more)


def _call(frame: wire.CallFrame) -> CallRequest:
    return CallRequest(
        rollout_id=frame.rollout_id,
        text=frame.text,
        name=frame.name,
        arguments=frame.arguments,
        malformed=frame.malformed,
        prompt_tokens=frame.prompt_tokens,
        completion_tokens=frame.completion_tokens,
    )


def _final(frame: wire.FinalFrame) -> FinalRequest:
    return FinalRequest(
        rollout_id=frame.rollout_id,
        text=frame.text,
        stop=frame.stop,
        prompt_tokens=frame.prompt_tokens,
        completion_tokens=frame.completion_tokens,
    )


def _clean(text: str | None) -> str | None:
    """Text that UTF-8 can carry: a lone surrogate becomes a question mark."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def _fault(error: BaseException) -> wire.Fault:
    match error:
        case JailError(reason=code, detail=detail):
            pass
        case wire.ProtocolError():
            code, detail = "env.protocol", str(error)
        case ConfigError():
            code, detail = "env.config", str(error)
        case SystemExit() | KeyboardInterrupt():
            code, detail = "env.exited", describe(error)
        case MemoryError():
            code, detail = "env.memory", describe(error)
        case _:
            code, detail = "env.crashed", describe(error)
    return wire.Fault(code=code, detail=(_clean(detail) or "")[:4000])


def _read_frame(fd: int) -> bytes | None:
    header = _read_exactly(fd, wire.HEADER_BYTES)
    return None if header is None else _read_exactly(fd, wire.frame_length(header))


def _read_exactly(fd: int, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        chunk = os.read(fd, count - len(parts))
        if not chunk:
            return None
        parts += chunk
    return bytes(parts)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def main(arguments: list[str]) -> None:
    """`REQUEST_FD REPLY_FD JOB_DIR`; leaves without running exit hooks of the job."""
    request_fd, reply_fd, job_dir = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    with contextlib.suppress(BrokenPipeError):
        serve(request_fd, reply_fd, job_dir)
    sys.stderr.flush()
    os._exit(0)
