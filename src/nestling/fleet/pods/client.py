"""A pod's end of the channel: enrol, poll, say, fetch and upload, each resumable."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from nestling.core.errors import FleetError
from nestling.fleet.pods.identity import pinned_context
from nestling.fleet.pods.wire import (
    PIECE_BYTES,
    WAIT_S,
    Enrol,
    Enrolled,
    FromPod,
    Have,
    Inbox,
    Outbox,
    Refusal,
    Seen,
    enrol_proof,
)

__all__ = ["ChannelLostError", "NotEnrolledError", "PodClient"]

_TIMEOUT = httpx.Timeout(15.0, read=WAIT_S + 15.0)


class ChannelLostError(FleetError):
    """The controller did not answer, or not in its language; try again later."""


class NotEnrolledError(FleetError):
    """The controller does not know the token, for example because it is a new one; enrol again."""


class PodClient:
    """Speaks to one controller whose certificate is pinned. Raises `ChannelLostError` throughout."""

    def __init__(self, address: str, certificate: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=address,
            verify=pinned_context(certificate),
            timeout=_TIMEOUT,
            trust_env=False,
            headers={"user-agent": "nestling-pod"},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def enrol(
        self, name: str, life: str, boot_key: bytes, found: Mapping[str, str]
    ) -> Enrolled | Refusal:
        """Prove to be a pod of this run and take what to run; keeps the token for later calls."""
        nonce = secrets.token_hex(16)
        enrol = Enrol(
            name=name,
            life=life,
            nonce=nonce,
            proof=enrol_proof(boot_key, name, life, nonce),
            found=dict(found),
        )
        reply = await self._ask("POST", "/v1/enrol", content=msgspec.json.encode(enrol))
        answer: Enrolled | Refusal = _decode(reply.content, Enrolled | Refusal)
        if isinstance(answer, Enrolled):
            self._http.headers["authorization"] = f"Bearer {answer.token}"
        return answer

    async def inbox(self, after: int) -> Inbox:
        """Messages after a number; waits a while for one."""
        params = {"after": after, "wait": int(WAIT_S)}
        found: Inbox = _decode((await self._ask("GET", "/v1/inbox", params=params)).content, Inbox)
        return found

    async def say(self, first: int, items: list[FromPod]) -> int:
        """Hand messages over; returns the number that the controller wants next."""
        body = msgspec.json.encode(Outbox(first=first, items=items))
        seen: Seen = _decode((await self._ask("POST", "/v1/outbox", content=body)).content, Seen)
        return seen.next

    async def fetch(self, digest: str, so_far: bytearray) -> bytes | None:
        """An artifact, checked; None when the controller has none for us.

        `so_far` keeps what has arrived: after `ChannelLostError` the same call goes on there.
        """
        total = -1
        while len(so_far) != total:
            headers = {"range": f"bytes={len(so_far)}-"}
            reply = await self._ask("GET", f"/v1/artifacts/{digest}", headers=headers, missing=True)
            if reply.status_code == 404:
                return None
            total = _total(reply.headers.get("content-range", ""))
            so_far += reply.content
            if len(so_far) > total or (not reply.content and len(so_far) < total):
                so_far.clear()
                raise ChannelLostError(f"artifact {digest} arrives in pieces that do not fit")
        if hashlib.sha256(so_far).hexdigest() != digest:
            so_far.clear()
            raise ChannelLostError(f"artifact {digest} arrived damaged")
        return bytes(so_far)

    async def upload(self, digest: str, data: bytes) -> None:
        """Bring a blob over, from where an earlier call was cut off."""
        path = f"/v1/blobs/{digest}"
        have: int = _decode((await self._ask("GET", path)).content, Have).size
        while have < len(data):
            piece = data[have : have + PIECE_BYTES]
            params = {"offset": have, "total": len(data)}
            reply = await self._ask("PUT", path, params=params, content=piece)
            have = _decode(reply.content, Have).size

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        missing: bool = False,
        **options: Any,  # noqa: ANN401 (httpx's)
    ) -> httpx.Response:
        try:
            reply = await self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ChannelLostError(f"{method} {path}: {type(error).__name__} {error}") from error
        if reply.status_code == 401:
            raise NotEnrolledError(f"{method} {path}: the controller does not know this pod")
        if not reply.is_success and not (missing and reply.status_code == 404):
            raise ChannelLostError(f"{method} {path}: {reply.status_code} {reply.text[:200]}")
        return reply


def _decode(body: bytes, kind: Any) -> Any:  # noqa: ANN401 (a union is no type)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise ChannelLostError(
            f"the controller's answer is not in its language: {error}"
        ) from error


def _total(header: str) -> int:
    text = header.rpartition("/")[2]
    if not text.isdigit():
        raise ChannelLostError(f"content-range {header!r}; expected the whole size")
    return int(text)
