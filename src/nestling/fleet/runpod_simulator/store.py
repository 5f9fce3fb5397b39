"""The small parts of the simulated API that only keep things: secrets, keys, templates, bills."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nestling.fleet.runpod_simulator.account import Account, ProblemError
from nestling.fleet.runpod_simulator.checks import read_body
from nestling.fleet.runpod_simulator.script import Route

__all__ = ["SimulatedStore"]

Answers = dict[str, tuple[Route, Callable[[Request], Awaitable[Response]]]]


class SimulatedStore:
    """Requests about everything that is not a pod."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def paths(self) -> dict[str, Answers]:
        """Answers by path and method."""
        found: dict[str, Answers] = {
            "/v2/account/secrets": {
                "GET": ("secrets", self._list_secrets),
                "POST": ("secrets", self._add_secret),
            },
            "/v2/account/secrets/{id}": {
                "PATCH": ("secrets", self._change_secret),
                "DELETE": ("secrets", self._drop_secret),
            },
            "/v2/account/ssh-keys": {
                "GET": ("other", self._ssh_keys),
                "PUT": ("other", self._put_ssh_keys),
            },
        }
        for kind in self._account.kept:
            key = {"templates": "templates", "network-volumes": "networkVolumes"}[kind]
            found[f"/v2/{kind}"] = {
                "GET": ("other", self._lister(kind, key)),
                "POST": ("other", self._adder(kind)),
            }
            found[f"/v2/{kind}/{{id}}"] = {
                "GET": ("other", self._getter(kind)),
                "DELETE": ("other", self._dropper(kind)),
            }
        return found

    async def billing(self, request: Request) -> Response:
        """Charges by pod and hour."""
        asked = request.query_params.get("podId")
        records = [
            {
                "startTime": hour * 3600,
                "endTime": (hour + 1) * 3600,
                "podId": pod_id,
                "totalAmount": round(usd, 6),
                "gpuAmount": round(usd, 6),
                "cpuAmount": 0,
                "diskAmount": 0,
            }
            for (pod_id, hour), usd in sorted(self._account.charges.items())
            if asked in (None, pod_id)
        ]
        return JSONResponse({"records": records, "metadata": {"bucketSize": "hour"}})

    async def _list_secrets(self, request: Request) -> Response:
        del request
        found = [{"id": key, "name": name} for key, (name, _) in self._account.secrets.items()]
        return JSONResponse({"secrets": found})

    async def _add_secret(self, request: Request) -> Response:
        body = _required(read_body(await request.body()), "name", "value")
        if body["name"] in [name for name, _ in self._account.secrets.values()]:
            raise ProblemError(409, "There is a secret of this name.")
        key = f"secret{secrets.token_hex(4)}"
        self._account.secrets[key] = (body["name"], body["value"])
        return JSONResponse({"id": key, "name": body["name"]}, 201)

    async def _change_secret(self, request: Request) -> Response:
        key, body = self._secret(request), read_body(await request.body())
        name, value = self._account.secrets[key]
        self._account.secrets[key] = (name, str(body.get("value", value)))
        return JSONResponse({"id": key, "name": name})

    async def _drop_secret(self, request: Request) -> Response:
        del self._account.secrets[self._secret(request)]
        return Response(status_code=204)

    def _secret(self, request: Request) -> str:
        key = str(request.path_params["id"])
        if key not in self._account.secrets:
            raise ProblemError(404, "Secret not found.")
        return key

    async def _ssh_keys(self, request: Request) -> Response:
        del request
        return JSONResponse({"keys": self._account.ssh_keys})

    async def _put_ssh_keys(self, request: Request) -> Response:
        """The whole set is replaced."""
        self._account.ssh_keys = [str(key) for key in read_body(await request.body())["keys"]]
        return JSONResponse({"keys": self._account.ssh_keys})

    def _lister(self, kind: str, key: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            del request
            return JSONResponse({key: list(self._account.kept[kind].values())})

        return answer

    def _adder(self, kind: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            body = _required(read_body(await request.body()), "name")
            item = body | {"id": f"{kind[:3]}{secrets.token_hex(4)}"}
            self._account.kept[kind][item["id"]] = item
            return JSONResponse(item, 201)

        return answer

    def _getter(self, kind: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return JSONResponse(self._kept(kind, request))

        return answer

    def _dropper(self, kind: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            del self._account.kept[kind][self._kept(kind, request)["id"]]
            return Response(status_code=204)

        return answer

    def _kept(self, kind: str, request: Request) -> dict[str, Any]:
        item = self._account.kept[kind].get(request.path_params["id"])
        if item is None:
            raise ProblemError(404, "Not found.")
        return item


def _required(body: dict[str, Any], *names: str) -> dict[str, Any]:
    missing = [f"missing required property {name}" for name in names if name not in body]
    if missing:
        raise ProblemError(422, "The body does not match the schema.", missing)
    return body
