"""What a pod and its controller say to one another over HTTPS, as JSON.

    POST /v1/enrol              who I am, what is installed here     -> token and what to run
    GET  /v1/inbox?after=&wait= messages after a number; waits       -> Inbox
    POST /v1/outbox             numbered messages, may be repeated   -> Seen
    GET  /v1/artifacts/<sha256> bytes of a bundle; Range resumes
    GET  /v1/blobs/<sha256>     how much of an upload has arrived    -> Have
    PUT  /v1/blobs/<sha256>     the next piece, `?offset=&total=`    -> Have

Messages of `fleet.messages` travel inside unchanged. Both directions number what they say and keep
it until the other side has it, so that a lost reply neither loses nor doubles a message. Every start
of the worker process in a pod is a generation; what an earlier one said is dropped.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Final

import msgspec

__all__ = [
    "BLOB_FROM_BYTES",
    "PIECE_BYTES",
    "WAIT_S",
    "BlobSaid",
    "ChildGone",
    "Enrol",
    "Enrolled",
    "FromPod",
    "Have",
    "Inbox",
    "Leaving",
    "Outbox",
    "PodLimits",
    "Refusal",
    "Restart",
    "Said",
    "Seen",
    "Tell",
    "ToPod",
    "WorkSpec",
    "enrol_proof",
]

PIECE_BYTES: Final = 256 * 1024
"""Of an upload or a download; what a broken connection costs at most."""
BLOB_FROM_BYTES: Final = 512 * 1024
"""Larger messages of a worker go as a blob."""
WAIT_S: Final = 20.0
"""How long an empty inbox keeps a pod waiting; also the slowest sign of life of an idle pod."""


class PodLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When a pod ends itself, in seconds."""

    idle_s: float
    lost_controller_s: float
    max_age_s: float


class Enrol(msgspec.Struct, frozen=True, kw_only=True):
    """The first word of a pod's supervisor."""

    name: str
    life: str
    """Random per start of the container: a second one in the same pod is a restart loop."""
    nonce: str
    proof: str
    """`enrol_proof` with the run's boot key, which a pod gets as a secret of the account."""
    found: dict[str, str]
    """What is installed here, by pin."""


class WorkSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod runs. Only ever sent to an enrolled pod."""

    handlers: str
    """`module:function` that makes the handlers."""
    settings: dict[str, Any]
    """JSON for that function; the pod adds `run` and `state`, folders of its own."""
    private: dict[str, bytes]
    """Secret files of the state folder, by name."""
    beat_s: float
    limits: PodLimits


class Enrolled(msgspec.Struct, frozen=True, kw_only=True, tag="enrolled"):
    """Welcome."""

    token: str
    """Bearer of every later request; for this pod, this life and this controller."""
    session: str
    """Random per life of the controller: with a new one both sides count from the start."""
    spec: WorkSpec


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """Not welcome; the pod ends itself."""

    reason: str
    detail: str


class Tell(msgspec.Struct, frozen=True, kw_only=True, tag="tell"):
    """A message for the worker process."""

    seq: int
    message: msgspec.Raw


class Restart(msgspec.Struct, frozen=True, kw_only=True, tag="restart"):
    """End the worker process with all it started, wipe, and start generation `generation`."""

    seq: int
    generation: int


ToPod = Tell | Restart


class Inbox(msgspec.Struct, frozen=True, kw_only=True):
    """Messages in order."""

    items: list[ToPod]


class Said(msgspec.Struct, frozen=True, kw_only=True, tag="said"):
    """A message of the worker process."""

    generation: int
    message: msgspec.Raw


class BlobSaid(msgspec.Struct, frozen=True, kw_only=True, tag="blob"):
    """A message of the worker process that was uploaded before."""

    generation: int
    digest: str


class ChildGone(msgspec.Struct, frozen=True, kw_only=True, tag="gone"):
    """The worker process ended by itself."""

    generation: int
    words: str
    """The end of its log."""


class Leaving(msgspec.Struct, frozen=True, kw_only=True, tag="leaving"):
    """The pod is about to end itself."""

    why: str


FromPod = Said | BlobSaid | ChildGone | Leaving


class Outbox(msgspec.Struct, frozen=True, kw_only=True):
    """Messages `first`, `first` + 1, ... of this life."""

    first: int
    items: list[FromPod]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """All messages below this number have arrived."""

    next: int


class Have(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of an upload that have arrived."""

    size: int


def enrol_proof(boot_key: bytes, name: str, life: str, nonce: str) -> str:
    """Shows that a pod holds the run's boot key without sending it: HMAC-SHA256, hex."""
    text = "\x00".join(("nestling-enrol", name, life, nonce))
    return hmac.new(boot_key, text.encode(), hashlib.sha256).hexdigest()
