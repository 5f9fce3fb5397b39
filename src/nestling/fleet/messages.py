"""What a controller and a worker say to one another, and how it is framed.

Controller to worker: `Work`, `Stop`. Worker to controller: `Ready`, `Beat`, `Stage`, `Progress`,
`Done`, `Failed`. A frame is four bytes of length, big-endian, then JSON. Every message of a worker
about a job carries the lease token it was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from nestling.core.errors import FleetError

__all__ = [
    "HEADER_BYTES",
    "Beat",
    "Done",
    "Failed",
    "FromWorker",
    "Progress",
    "Ready",
    "Stage",
    "Stop",
    "ToWorker",
    "Work",
    "artifacts_of",
    "decode_from_worker",
    "decode_to_worker",
    "encode",
    "frame_length",
]

HEADER_BYTES: Final = 4
_MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
_ARTIFACT_KEYS: Final = ("bundle",)


class _Message(
    msgspec.Struct, frozen=True, kw_only=True, tag=str.lower, forbid_unknown_fields=True
):
    """Base of all messages; the JSON field `type` names the class."""


class Work(_Message, frozen=True, kw_only=True):
    """Do this job."""

    token: str
    job_id: str
    kind: str
    payload: dict[str, Any]


class Stop(_Message, frozen=True, kw_only=True):
    """Finish and exit."""


class Ready(_Message, frozen=True, kw_only=True):
    """The worker has loaded everything and waits for work."""

    pid: int


class Beat(_Message, frozen=True, kw_only=True):
    """Still alive and at it."""

    token: str


class Stage(_Message, frozen=True, kw_only=True):
    """A stage of the job begins; it may take `limit_s`."""

    token: str
    name: str
    limit_s: float


class Progress(_Message, frozen=True, kw_only=True):
    """Something worth showing while the job runs."""

    token: str
    data: dict[str, Any]


class Done(_Message, frozen=True, kw_only=True):
    """The job's result, as JSON."""

    token: str
    result: Any


class Failed(_Message, frozen=True, kw_only=True):
    """The handler raised."""

    token: str
    reason: str
    detail: str
    retry: bool


ToWorker = Work | Stop
FromWorker = Ready | Beat | Stage | Progress | Done | Failed

_encoder = msgspec.json.Encoder()
_to_worker: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)
_from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)


def artifacts_of(payload: Mapping[str, Any]) -> Sequence[str]:
    """Names of the artifacts that a job's payload needs, for a worker that must be brought them."""
    values = (payload.get(key) for key in _ARTIFACT_KEYS)
    return [value for value in values if isinstance(value, str)]


def encode(message: ToWorker | FromWorker) -> bytes:
    """One frame; `FleetError` when the message is too large."""
    body = _encoder.encode(message)
    if len(body) > _MAX_FRAME_BYTES:
        raise FleetError(
            f"a {type(message).__name__} message of {len(body)} bytes; expected at most "
            f"{_MAX_FRAME_BYTES}; put large data into the artifact store and send its name"
        )
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def frame_length(header: bytes) -> int:
    """Length of the body after a header; `FleetError` when it cannot be one."""
    length = int.from_bytes(header, "big")
    if length > _MAX_FRAME_BYTES:
        raise FleetError(
            f"a frame of {length} bytes announced; expected at most {_MAX_FRAME_BYTES}; the other "
            f"side does not speak this protocol"
        )
    return length


def decode_to_worker(body: bytes) -> ToWorker:
    """A message of the controller; `FleetError` when it is none."""
    try:
        return _to_worker.decode(body)
    except msgspec.MsgspecError as error:
        raise FleetError(
            f"not a controller message: {error}; use one version on both sides"
        ) from error


def decode_from_worker(body: bytes) -> FromWorker:
    """A message of a worker; `FleetError` when it is none."""
    try:
        return _from_worker.decode(body)
    except msgspec.MsgspecError as error:
        raise FleetError(f"not a worker message: {error}; use one version on both sides") from error
