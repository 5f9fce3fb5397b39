"""What can go wrong at a paid service, named by what to do about it. Knows no SDK.

The SDK waits in silence on some answers: HTTP 402 (no billing) is retried for minutes, rate limits and
lack of capacity for as long as they last, with a line in its own log at most. `PauseWatch` reads that
log, so that a pause is reported as what it is and not as a call that hangs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from nestling.core.clock import Clock
from nestling.core.errors import LearnerError

__all__ = ["FaultKind", "Pause", "PauseWatch", "TinkerFaultError", "fault_of", "scrubbed"]

FaultKind = Literal[
    "billing",
    "budget",
    "capacity",
    "failed",
    "key",
    "missing",
    "rate_limit",
    "refused",
    "timeout",
    "unreachable",
]

WHAT_TO_DO: Final[dict[FaultKind, str]] = {
    "billing": "add a payment method or credit in the service's console, then resume the run",
    "budget": "raise learner.max_usd, or end the run here",
    "capacity": "the service is full: wait and resume the run later",
    "failed": "resume the run from its last step; if it repeats, report it to the service",
    "key": "set TINKER_API_KEY to a valid key in the environment",
    "missing": (
        "a checkpoint lives for learner.checkpoint_ttl_s: raise it for runs that pause for long, and "
        "check learner.base_model"
    ),
    "rate_limit": (
        "the account's limit of requests or of concurrent runs is reached: lower "
        "outer.max_parallel_episodes, end other runs, or ask the service for a higher limit"
    ),
    "refused": "check the request against `nestling doctor --learner tinker`",
    "timeout": "resume the run; raise the learner's time limits if the service is only slow",
    "unreachable": "check the network, learner.base_url and the service's status page",
}

_BY_STATUS: Final[dict[int, FaultKind]] = {
    400: "refused",
    401: "key",
    402: "billing",
    403: "key",
    404: "missing",
    409: "refused",
    410: "failed",
    413: "refused",
    422: "refused",
    429: "rate_limit",
    503: "capacity",
}
_MAX_DETAIL: Final = 400
_FRESH_S: Final = 180.0
"""The SDK repeats the line of a pause that lasts about once a minute."""


class TinkerFaultError(LearnerError):
    """The service did not do what was asked; `kind` says what sort of trouble it is."""

    def __init__(self, kind: FaultKind, wrong: str) -> None:
        super().__init__(f"tinker ({kind}): {wrong}; {WHAT_TO_DO[kind]}")
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A wait that the SDK has told of."""

    kind: FaultKind
    detail: str
    at: float
    """Monotonic seconds."""


def fault_of(what: str, error: BaseException, secrets: tuple[str, ...] = ()) -> TinkerFaultError:
    """An SDK's error as ours; looks through the chain of causes for an HTTP status."""
    if isinstance(error, TinkerFaultError):
        return error
    detail = scrubbed(f"{type(error).__name__}: {error}", secrets)[:_MAX_DETAIL]
    return TinkerFaultError(_kind(error), f"{what} failed: {detail}")


def scrubbed(text: str, secrets: tuple[str, ...]) -> str:
    """The text without the secrets, should an SDK have put one into it."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "[key]")
    return text


class PauseWatch(logging.Handler):
    """Reads the SDK's log for pauses; use as a context manager or `close` it."""

    def __init__(
        self,
        clock: Clock,
        on_pause: Callable[[Pause], None] | None = None,
        *,
        secrets: tuple[str, ...] = (),
        logger_name: str = "tinker",
    ) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._on_pause = on_pause
        self._secrets = secrets
        self._lock_last = threading.Lock()
        self._last: Pause | None = None
        self._logger = logging.getLogger(logger_name)
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging, in whatever thread the SDK runs."""
        text = record.getMessage()
        kind = _pause_kind(text)
        if kind is None:
            return
        detail = scrubbed(text, self._secrets)[:_MAX_DETAIL]
        pause = Pause(kind=kind, detail=detail, at=self._clock.monotonic())
        with self._lock_last:
            self._last = pause
        if self._on_pause is not None:
            self._on_pause(pause)

    def current(self) -> Pause | None:
        """The last pause told of, unless it is too long ago to be still going on."""
        with self._lock_last:
            last = self._last
        if last is None or self._clock.monotonic() - last.at > _FRESH_S:
            return None
        return last

    def close(self) -> None:
        """Stop listening; may be called twice."""
        self._logger.removeHandler(self)
        super().close()


def _kind(error: BaseException) -> FaultKind:
    seen: BaseException | None = error
    while seen is not None:
        status = getattr(seen, "status_code", None)
        if isinstance(status, int) and status in _BY_STATUS:
            return _BY_STATUS[status]
        if type(seen).__name__ == "APIConnectionError" or isinstance(seen, ConnectionError):
            return "unreachable"
        if type(seen).__name__ == "APITimeoutError" or isinstance(seen, TimeoutError):
            return "timeout"
        seen = seen.__cause__ or seen.__context__
    return "failed"


def _pause_kind(text: str) -> FaultKind | None:
    """Words of SDK 0.24 to 0.38: `... is paused. Reason: ...`, `paused due to billing status`."""
    low = text.lower()
    if "paused" not in low:
        return None
    if "billing" in low:
        return "billing"
    if "limit" in low:
        return "rate_limit"
    return "capacity"
