"""The dozen calls of the Runpod REST API v2 that a pool of pods needs. Fields: SPEC v2.0.0."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from nestling.fleet.providers.runpod_errors import ConflictError, MissingError, UncertainError
from nestling.fleet.providers.runpod_http import RunpodHttp

__all__ = ["ApiPod", "Gpu", "PodRequest", "RunpodApi"]

_PAGE = 1000
_LOG_S = 4.0

T = TypeVar("T")


class PodRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A pod to be made."""

    name: str
    image: str
    gpu_id: str
    gpu_count: int = 1
    cloud: str = "SECURE"
    data_centers: Sequence[str] = ()
    min_cuda_version: str | None = None
    disk_gb: int = 40
    env: Mapping[str, str] = {}
    command: Sequence[str] = ()
    """Exec form; empty: the image's own."""

    def body(self) -> dict[str, Any]:
        """As CreatePod wants it; no port is opened and no ssh is started, as nothing needs them."""
        gpu: dict[str, Any] = {"id": self.gpu_id, "count": self.gpu_count}
        if self.min_cuda_version is not None:
            gpu["minCudaVersion"] = self.min_cuda_version
        body: dict[str, Any] = {
            "name": self.name,
            "image": self.image,
            "gpu": gpu,
            "cloud": self.cloud,
            "disk": self.disk_gb,
            "env": dict(self.env),
        }
        if self.data_centers:
            body["dataCenterIds"] = list(self.data_centers)
        if self.command:
            body["entrypoint"], body["cmd"] = [self.command[0]], list(self.command[1:])
        return body


class _Runtime(msgspec.Struct, kw_only=True):
    uptime: float = 0.0


class ApiPod(msgspec.Struct, kw_only=True):
    """The fields of a pod that we read; others are passed over."""

    id: str
    name: str
    status: str
    cost: float = 0.0
    """USD per hour; not zero after a stop, so the status says whether it runs."""
    env: dict[str, str] = {}
    runtime: _Runtime | None = None


class _Price(msgspec.Struct, kw_only=True):
    secure: float | None = None
    community: float | None = None


class Gpu(msgspec.Struct, kw_only=True):
    """One GPU type of the catalog."""

    id: str
    price: _Price | None = None
    availability: str | None = None
    """NONE, LOW, MEDIUM, HIGH; a hint, not a reservation."""

    def usd_per_hour(self, cloud: str) -> float | None:
        """Of one GPU."""
        if self.price is None:
            return None
        return self.price.secure if cloud == "SECURE" else self.price.community


class _Pagination(msgspec.Struct, kw_only=True, rename="camel"):
    next_cursor: str | None = None
    has_next_page: bool = False


class _Page(msgspec.Struct, kw_only=True):
    pods: list[ApiPod]
    pagination: _Pagination = msgspec.field(default_factory=_Pagination)


class _Gpus(msgspec.Struct, kw_only=True):
    gpus: list[Gpu]


class _Secret(msgspec.Struct, kw_only=True):
    id: str
    name: str


class _Secrets(msgspec.Struct, kw_only=True):
    secrets: list[_Secret]


class RunpodApi:
    """Typed calls; all raise `RunpodError`."""

    def __init__(self, http: RunpodHttp) -> None:
        self.http = http

    async def create_pod(self, request: PodRequest, *, limit_s: float) -> ApiPod:
        """Make a pod. Never repeated: after `UncertainError` it may exist, look for its name."""
        made = await self.http.ask("POST", "/pods", body=request.body(), limit_s=limit_s)
        return _read("POST /pods", made, ApiPod)

    async def list_pods(self) -> list[ApiPod]:
        """All pods of the account; reads every page, as a short page need not be the last."""
        pods: list[ApiPod] = []
        params: dict[str, str | int] = {"limit": _PAGE}
        while True:
            page = _read("GET /pods", await self.http.ask("GET", "/pods", params=params), _Page)
            pods += page.pods
            if not page.pagination.has_next_page or not page.pagination.next_cursor:
                return pods
            params["cursor"] = page.pagination.next_cursor

    async def get_pod(self, pod_id: str) -> ApiPod | None:
        """One pod; None when the API has none of that id."""
        try:
            return _read("GET /pods/id", await self.http.ask("GET", f"/pods/{pod_id}"), ApiPod)
        except MissingError:
            return None

    async def delete_pod(self, pod_id: str) -> bool:
        """Terminate a pod; False when the API knows none of that id, which a young one may outlive."""
        try:
            await self.http.ask("DELETE", f"/pods/{pod_id}")
        except MissingError:
            return False
        return True

    async def gpus(self, cloud: str) -> list[Gpu]:
        """The catalog with prices and stock for pods."""
        params = {"include": "AVAILABILITY", "product": "POD", "cloud": cloud}
        found = await self.http.ask("GET", "/catalog/gpus", params=params)
        return _read("GET /catalog/gpus", found, _Gpus).gpus

    async def log_tail(self, pod_id: str, source: str, lines: int = 20) -> str:
        """The last lines of a pod's log, after a few seconds: the stream never ends by itself."""
        found: list[str] = []
        params: dict[str, str | int] = {"source": source, "tail": lines}
        try:
            async with (
                asyncio.timeout(_LOG_S),
                self.http.lines(f"/pods/{pod_id}/logs", params, {}) as stream,
            ):
                async for line in stream:
                    if line.startswith("data:"):
                        found.append(line.removeprefix("data:").strip())
                    if len(found) >= lines:
                        break
        except TimeoutError:
            pass
        return "\n".join(found)

    async def keep_secret(self, name: str, value: str) -> None:
        """Make an account secret, or give it this value; may be repeated."""
        secret_id = await self._secret_id(name)
        if secret_id is None:
            try:
                await self.http.ask("POST", "/account/secrets", body={"name": name, "value": value})
            except (ConflictError, UncertainError):
                secret_id = await self._secret_id(name)
                if secret_id is None:
                    raise
        if secret_id is not None:
            body = {"value": value}
            await self.http.ask("PATCH", f"/account/secrets/{secret_id}", body=body)

    async def drop_secrets(self, prefix: str) -> None:
        """Remove the account secrets whose name begins so."""
        for secret in await self._secrets():
            if secret.name.startswith(prefix):
                try:
                    await self.http.ask("DELETE", f"/account/secrets/{secret.id}")
                except MissingError:
                    continue

    async def _secret_id(self, name: str) -> str | None:
        return next((one.id for one in await self._secrets() if one.name == name), None)

    async def _secrets(self) -> list[_Secret]:
        found = await self.http.ask("GET", "/account/secrets")
        return _read("GET /account/secrets", found, _Secrets).secrets


def _read(what: str, value: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise UncertainError(what, detail=f"an answer of another shape: {error}") from error
