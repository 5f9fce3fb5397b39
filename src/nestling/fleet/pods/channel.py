"""The controller's HTTPS server for its pods: they come to it, so none needs an address of its own.

Why pods pull: a rented pod may have no public address, its port map changes, and the provider's
HTTP proxy is public and cuts long requests; but every pod can reach out. The controller needs one
port that pods can reach, directly or through any TCP tunnel: the certificate is pinned, so whoever
carries the bytes can neither read nor change them. A pod proves itself with the run's boot key (an
HMAC; the key is not sent) and then holds a token of its own, known to both only in memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from nestling.core.clock import Clock
from nestling.core.errors import ConfigError, FleetError, StoreError
from nestling.core.listening import bound_socket
from nestling.core.rundir import ArtifactStore
from nestling.fleet.pods.identity import PodIdentity
from nestling.fleet.pods.link import PodLink
from nestling.fleet.pods.pins import drift
from nestling.fleet.pods.wire import (
    PIECE_BYTES,
    WAIT_S,
    Enrol,
    Enrolled,
    Have,
    Outbox,
    Refusal,
    WorkSpec,
    enrol_proof,
)

__all__ = ["Admit", "PodChannel", "TooEarlyError", "listening_socket", "quiet_server"]

_log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 4 * 1024 * 1024
_END_S = 10.0

Admit = Callable[[str, str, Sequence[str]], Awaitable[str | None]]
"""Pod name, life and drift to a reason for refusing it; None lets it in.

`TooEarlyError` has it come again: a pod may call before its making is known to have worked.
"""


class TooEarlyError(FleetError):
    """This pod is to come again in a moment."""


class PodChannel:
    """Links to enrolled pods by name."""

    def __init__(
        self,
        *,
        identity: PodIdentity,
        spec: WorkSpec,
        pins: Mapping[str, str],
        artifacts: ArtifactStore,
        clock: Clock,
        admit: Admit,
    ) -> None:
        self.links: dict[str, PodLink] = {}
        self._identity = identity
        self._spec = spec
        self._pins = dict(pins)
        self._artifacts = artifacts
        self._clock = clock
        self._admit = admit
        self._session = secrets.token_hex(8)
        self._tokens: dict[bytes, PodLink] = {}
        """By the hash of the token, so that no comparison leaks it."""
        self.app = Starlette(
            routes=[
                Route("/v1/enrol", self._enrol, methods=["POST"]),
                Route("/v1/inbox", self._known(self._inbox)),
                Route("/v1/outbox", self._known(self._outbox), methods=["POST"]),
                Route("/v1/artifacts/{digest}", self._known(self._artifact)),
                Route("/v1/blobs/{digest}", self._known(self._blob), methods=["GET", "PUT"]),
            ]
        )

    @asynccontextmanager
    async def listening(self, listen: str) -> AsyncIterator[int]:
        """Accept pods at `host:port` inside the block; gives the port. `ConfigError` when taken."""
        taken = listening_socket(listen)
        config = uvicorn.Config(
            self.app,
            ssl_certfile=str(self._identity.certificate_file),
            ssl_keyfile=str(self._identity.key_file),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=int(4 * WAIT_S),
            timeout_graceful_shutdown=1,
        )
        async with quiet_server(config, taken):
            yield taken.getsockname()[1]

    def forget(self, name: str) -> None:
        """Its token opens nothing any more."""
        link = self.links.pop(name, None)
        if link is not None:
            link.end("it was ended")
            self._tokens = {key: one for key, one in self._tokens.items() if one is not link}

    async def _enrol(self, request: Request) -> Response:
        try:
            enrol = msgspec.json.decode(await _body(request), type=Enrol)
        except (msgspec.MsgspecError, FleetError):
            return Response(status_code=400)
        proof = enrol_proof(self._identity.boot_key, enrol.name, enrol.life, enrol.nonce)
        if not hmac.compare_digest(proof, enrol.proof):
            _log.warning("somebody who does not hold the boot key called as pod %.60r", enrol.name)
            return Response(status_code=401)
        found = drift(self._pins, enrol.found)
        try:
            reason = await self._admit(enrol.name, enrol.life, found)
        except TooEarlyError:
            return Response(status_code=503)
        if reason is not None:
            return _json(Refusal(reason=reason, detail="; ".join(found)))
        link = self.links.get(enrol.name)
        if link is None:
            link = self.links[enrol.name] = PodLink(enrol.name, enrol.life, self._clock)
        link.note_life()
        token = secrets.token_urlsafe(32)
        self._tokens = {key: one for key, one in self._tokens.items() if one is not link}
        self._tokens[_hash(token)] = link
        return _json(Enrolled(token=token, session=self._session, spec=self._spec))

    def _known(
        self, answer: Callable[[Request, PodLink], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def check(request: Request) -> Response:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            link = self._tokens.get(_hash(token)) if scheme == "Bearer" else None
            if link is None:
                return Response(status_code=401)
            link.note_life()
            try:
                return await answer(request, link)
            except FleetError as error:
                return Response(str(error), status_code=400)
            except ClientDisconnect:
                return Response(status_code=400)

        return check

    async def _inbox(self, request: Request, link: PodLink) -> Response:
        after = _number(request, "after")
        found = await link.inbox(after, min(WAIT_S, float(_number(request, "wait"))))
        link.note_life()
        return _json(found)

    async def _outbox(self, request: Request, link: PodLink) -> Response:
        try:
            outbox = msgspec.json.decode(await _body(request), type=Outbox)
        except msgspec.MsgspecError as error:
            raise FleetError(f"not an outbox: {error}") from error
        return _json(link.take(outbox))

    async def _artifact(self, request: Request, link: PodLink) -> Response:
        digest = request.path_params["digest"]
        if digest not in link.artifacts:
            return Response(status_code=404)  # also when it exists: it is not this pod's
        try:
            data = await asyncio.to_thread(self._artifacts.get, digest)
        except StoreError as error:
            return Response(str(error), status_code=404)
        start = _range_start(request.headers.get("range", ""))
        piece = data[start : start + PIECE_BYTES]
        headers = {"content-range": f"bytes {start}-{start + len(piece) - 1}/{len(data)}"}
        return Response(
            piece, status_code=206, headers=headers, media_type="application/octet-stream"
        )

    async def _blob(self, request: Request, link: PodLink) -> Response:
        digest = request.path_params["digest"]
        if request.method == "GET":
            return _json(Have(size=link.blob_size(digest)))
        offset, total = _number(request, "offset"), _number(request, "total")
        return _json(Have(size=link.add_piece(digest, offset, total, await _body(request))))


class _QuietServer(uvicorn.Server):
    """Leaves the signals of the process to whoever started it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def quiet_server(config: uvicorn.Config, taken: socket.socket) -> AsyncIterator[None]:
    """Serve on a bound socket inside the block; the socket is closed with it."""
    server = _QuietServer(config)
    with taken:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(server.serve(sockets=[taken]))
            while not server.started and not task.done():  # noqa: ASYNC110 (a flag is all there is)
                await asyncio.sleep(0.005)
            try:
                yield
            finally:
                server.should_exit = True
                # Also after an error, which would cancel it half-way otherwise.
                await asyncio.wait((task,), timeout=_END_S)


def listening_socket(listen: str, *, setting: str = "fleet.listen") -> socket.socket:
    """A listening socket at `host:port`, without a host at all addresses; `ConfigError` when it cannot be had."""
    host, _, port = listen.rpartition(":")
    if not (port.isascii() and port.isdigit()):
        raise ConfigError(f"{setting} = {listen!r}; expected host:port; for example 0.0.0.0:8443")
    return bound_socket(host.strip("[]") or "0.0.0.0", int(port), setting=setting)  # noqa: S104 (asked for)


async def _body(request: Request) -> bytes:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > _MAX_BODY_BYTES:
            raise FleetError(f"a body above {_MAX_BODY_BYTES} bytes; send it as a blob")
    return bytes(data)


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise FleetError(f"query {name}={text!r}; expected a whole number")
    return int(text)


def _range_start(header: str) -> int:
    text = header.removeprefix("bytes=").partition("-")[0]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 15 else 0


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _json(value: Any) -> Response:  # noqa: ANN401 (any struct)
    return Response(msgspec.json.encode(value), media_type="application/json")
