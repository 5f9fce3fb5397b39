"""The scorer process: `python -m nestling.inner.score_worker`, spoken to over its own pipes.

It holds the eval secret, the pinned bases and the libraries, stays warm between jobs, and reads
nothing of a job but one file of tensors. It ends when its input ends.
"""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from nestling.core.errors import ConfigError, JobFailedError, LearnerError, ModelError
from nestling.core.heap import trim_heap
from nestling.families.splits import EvalSecret
from nestling.inner.score_wire import (
    MAX_LINE_BYTES,
    REQUEST,
    STACK_LOST,
    Ready,
    Refused,
    ScoreReply,
    ScoreRequest,
    Start,
)

if TYPE_CHECKING:
    from nestling.inner.scoring import Scoring

__all__ = ["main"]

_MAX_DETAIL_CHARS: Final = 2000


def main() -> None:
    """Answer requests from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    requests, replies = _own_pipes()
    start = REQUEST.validate_json(requests.readline(MAX_LINE_BYTES))
    if not isinstance(start, Start):
        raise SystemExit("the first line must be a start message")
    try:
        secret = EvalSecret.load_or_create(Path(start.secret_path))
    except ConfigError as error:
        _send(replies, Refused(reason="scorer.config", detail=str(error)))
        return
    from nestling.inner.scoring import Scoring  # takes seconds, so a wrong secret is told first

    folders = {name: Path(folder) for name, folder in start.bases.items()}
    with closing(
        Scoring(secret, folders, start.stacks, device=start.device, openai=start.openai)
    ) as scoring:
        _answer(scoring, start.wall_s, requests, replies)


def _answer(scoring: Scoring, start_wall_s: float, requests: BinaryIO, replies: BinaryIO) -> None:
    try:
        _send(replies, scoring.ready(start_wall_s))
    except (ConfigError, JobFailedError, LearnerError) as error:
        _send(replies, _refused(error))
        return
    while line := requests.readline(MAX_LINE_BYTES):
        request = REQUEST.validate_json(line)
        if not isinstance(request, ScoreRequest):
            raise SystemExit("only the first line may be a start message")
        try:
            reply: ScoreReply | Refused = scoring.score(request)
        except (ConfigError, JobFailedError, LearnerError, ModelError) as error:
            reply = _refused(error)
        _send(replies, reply)
        trim_heap()


def _refused(error: ConfigError | JobFailedError | LearnerError | ModelError) -> Refused:
    match error:
        case JobFailedError(reason=reason, detail=detail):
            return Refused(reason=reason, detail=detail[:_MAX_DETAIL_CHARS])
        case ConfigError():
            reason = "scorer.config"
        case LearnerError():
            reason = STACK_LOST
        case _:
            reason = "scorer.refused"
    return Refused(reason=reason, detail=str(error)[:_MAX_DETAIL_CHARS])


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Input and output of this protocol; whatever a library prints goes to standard error."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, replies


def _send(replies: BinaryIO, message: Ready | ScoreReply | Refused) -> None:
    replies.write(message.model_dump_json().encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()
