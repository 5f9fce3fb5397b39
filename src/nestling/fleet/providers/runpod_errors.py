"""What the Runpod API may answer, as types: callers decide by type, never by prose.

RunpodError                 carries status, detail, errors and the request id
├── KeyRefusedError         401: the key is missing or wrong
├── AccessError             403: on create this pool is closed to us; elsewhere the key may not
├── NoCreditError           402: less than an hour of credit is left
├── RefusedError            400: no stock, or a request that no machine can meet; they look alike
├── DefectError             413, 422 and other 4xx: the request itself is wrong
├── MissingError            404
├── ConflictError           409: not in this state
├── RateLimitedError        429, still after waiting
└── UncertainError          timeout, dropped connection, 5xx, unreadable answer: it may have happened
"""

from __future__ import annotations

from collections.abc import Sequence

from nestling.core.errors import FleetError

__all__ = [
    "AccessError",
    "ConflictError",
    "DefectError",
    "KeyRefusedError",
    "MissingError",
    "NoCreditError",
    "RateLimitedError",
    "RefusedError",
    "RunpodError",
    "UncertainError",
    "error_of",
]

_MAX_DETAIL_CHARS = 500


class RunpodError(FleetError):
    """The API did not do what was asked."""

    def __init__(
        self,
        what: str,
        *,
        status: int = 0,
        detail: str = "",
        errors: Sequence[str] = (),
        request_id: str = "",
    ) -> None:
        parts = [what, f"answered {status}" if status else "", detail[:_MAX_DETAIL_CHARS]]
        parts += [f"({'; '.join(errors)})" if errors else ""]
        parts += [f"[request {request_id}]" if request_id else ""]
        super().__init__(" ".join(part for part in parts if part))
        self.status = status
        self.detail = detail
        self.errors = tuple(errors)
        self.request_id = request_id
        self.retry_after_s: float | None = None


class KeyRefusedError(RunpodError):
    """The key is missing or wrong."""


class AccessError(RunpodError):
    """The key is good but may not do this."""


class NoCreditError(RunpodError):
    """Less than an hour of credit is left."""


class RefusedError(RunpodError):
    """No machine for this request now."""


class DefectError(RunpodError):
    """The request is wrong and will stay so."""


class MissingError(RunpodError):
    """There is no such thing."""


class ConflictError(RunpodError):
    """Not possible in its present state."""


class RateLimitedError(RunpodError):
    """Too many requests, still after waiting."""


class UncertainError(RunpodError):
    """Nobody knows whether it happened."""


_BY_STATUS: dict[int, type[RunpodError]] = {
    400: RefusedError,
    401: KeyRefusedError,
    402: NoCreditError,
    403: AccessError,
    404: MissingError,
    409: ConflictError,
    429: RateLimitedError,
}


def error_of(
    what: str, status: int, detail: str, errors: Sequence[str], request_id: str
) -> RunpodError:
    """The error for a status. A missing property is named first: 422 also lists valid fields then."""
    kind = _BY_STATUS.get(status, UncertainError if status >= 500 else DefectError)
    ordered = sorted(errors, key=lambda line: "missing" not in line.lower())
    return kind(what, status=status, detail=detail, errors=ordered, request_id=request_id)
