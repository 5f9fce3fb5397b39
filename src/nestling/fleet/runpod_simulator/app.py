"""The Runpod REST API v2 over a simulated account, with its quirks and scripted faults.

Paths, fields, codes and quirks follow OpenAPI v2.0.0 and what users recorded; where they are silent
(the reply for an unknown GPU, DELETE on a locked pod) the choice is the one that asks most of a
client. `/_simulator/advance` moves the clock, `/_simulator/report` tells what it all cost.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route as Path
from starlette.types import Receive, Scope, Send

from nestling.fleet.runpod_simulator.account import Account, ProblemError
from nestling.fleet.runpod_simulator.checks import (
    MAX_BODY_BYTES,
    RateWindows,
    check_agent,
    check_create,
    read_body,
)
from nestling.fleet.runpod_simulator.pod import SimulatedPod
from nestling.fleet.runpod_simulator.script import RequestFault, Route
from nestling.fleet.runpod_simulator.store import SimulatedStore

__all__ = ["RunpodApp", "Seen"]

_PAGE = "<html><head><title>Access denied</title></head><body>error code: {}</body></html>"
_LOG_LOOK_S: Final = 0.5

Answer = Callable[[Request], Awaitable[Response]]


class Seen:
    """What the API was sent, to be searched for what must not be there. Keys are left out."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str]] = []
        """Method, path with query, body."""
        self.statuses: Counter[int] = Counter()

    def text(self) -> str:
        """Everything but what went into the write-only secrets."""
        return "\n".join(" ".join(one) for one in self.requests if "/account/secrets" not in one[1])


class RunpodApp:
    """An ASGI application."""

    def __init__(self, account: Account) -> None:
        script = account.script
        self.account = account
        self.seen = Seen()
        self._counts: Counter[str] = Counter()
        self.limits = RateWindows(
            account.time,
            {
                "minute": (script.per_minute, 60),
                "hour": (script.per_hour, 3600),
                "day": (script.per_day, 86_400),
            },
        )
        store = SimulatedStore(account)
        self.app = Starlette(
            routes=[
                self._path(
                    "/v2/pods", {"GET": ("list", self._list), "POST": ("create", self._create)}
                ),
                self._path(
                    "/v2/pods/{id}",
                    {
                        "GET": ("get", self._get),
                        "PATCH": ("other", self._patch),
                        "DELETE": ("delete", self._delete),
                    },
                ),
                self._path("/v2/pods/{id}/action", {"POST": ("action", self._action)}),
                self._path("/v2/pods/{id}/logs", {"GET": ("logs", self._logs)}),
                self._path("/v2/catalog/gpus", {"GET": ("catalog", self._gpus)}),
                self._path("/v2/catalog/gpus/{id:path}", {"GET": ("catalog", self._gpu)}),
                self._path("/v2/catalog/datacenters", {"GET": ("catalog", self._data_centers)}),
                self._path("/v2/billing", {"GET": ("other", store.billing)}),
                self._path("/v2/billing/pods", {"GET": ("other", store.billing)}),
                *(self._path(path, answers) for path, answers in store.paths().items()),
                Path("/_simulator/advance", self._advance, methods=["POST"]),
                Path("/_simulator/report", self._report),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await self.app(scope, receive, send)

    def report(self) -> dict[str, Any]:
        """What happened and what it cost, in plain values."""
        account = self.account
        account.settle()
        pods = account.pods.values()
        by_gpu: dict[str, dict[str, float]] = {}
        for pod in pods:
            entry = by_gpu.setdefault(pod.stock.gpu, {"pods": 0, "hours": 0.0, "usd": 0.0})
            entry["pods"] += 1
            entry["hours"] += pod.billed_usd / pod.usd_per_hour
            entry["usd"] += pod.billed_usd
        return {
            "simulated_s": round(account.time.elapsed(), 1),
            "pods_made": len(pods),
            "pods_left": len(account.live_pods()),
            "creates_refused": account.num_refused,
            "requests": len(self.seen.requests),
            "rate_limited": self.limits.num_limited,
            "statuses": {str(status): n for status, n in sorted(self.seen.statuses.items())},
            "usd": round(account.spent_usd(), 6),
            "credit_usd": round(account.credit_usd, 6),
            "by_gpu": by_gpu,
        }

    # --- around every request ----------------------------------------------------------------

    def _path(self, path: str, answers: dict[str, tuple[Route, Answer]]) -> Path:
        async def serve(request: Request) -> Response:
            reply = await self._guarded(request, answers)
            self.seen.statuses[reply.status_code] += 1
            reply.headers["x-request-id"] = uuid.uuid4().hex
            return reply

        every = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
        return Path(path, serve, methods=every)

    async def _guarded(
        self, request: Request, answers: dict[str, tuple[Route, Answer]]
    ) -> Response:
        self.account.settle()
        try:
            check_agent(request.headers.get("user-agent", ""))
        except PermissionError:
            return Response(_PAGE.format(1010), 403, media_type="text/html")
        body = await request.body()
        if len(body) > MAX_BODY_BYTES:
            return _problem(413, "Payload too large.")
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        self.seen.requests.append((request.method, path, body.decode("utf-8", "replace")))
        if not self._may(request):
            return _problem(401, "Unauthorized.")
        headers, wait_s = ({}, None) if self.account.script.exempt else self.limits.count()
        if wait_s is not None:
            reply = _problem(429, "Too many requests.")
            reply.headers["retry-after"] = str(wait_s)
        elif request.method not in answers:
            reply = _problem(405, "Method not allowed.")
            reply.headers["allow"] = ", ".join(answers)
        else:
            reply = await self._faulted(request, *answers[request.method])
        reply.headers.update(headers)
        return reply

    def _may(self, request: Request) -> bool:
        key = self._key(request)
        known = (self.account.key, f"{self.account.key}-read")
        return key in known or self.account.by_key(key) is not None

    def _key(self, request: Request) -> str:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return key if scheme == "Bearer" else ""

    async def _faulted(self, request: Request, route: Route, answer: Answer) -> Response:
        """The answer, or what the script makes of it."""
        self._counts[route] += 1
        fault = self._fault(route)
        if fault is None:
            return await self._answered(request, answer)
        if fault.do == "status":
            return _problem(fault.status, "An error on our side.")
        if fault.do == "html":
            return Response(_PAGE.format(fault.status), fault.status, media_type="text/html")
        if fault.do == "stock_out":
            self.account.num_refused += 1
            return _problem(400, "This machine does not have the resources to deploy your pod.")
        if fault.do == "stall":
            await self.account.time.sleep(fault.seconds)
            return await self._answered(request, answer)
        if fault.do == "reply_lost":
            await self._answered(request, answer)
        return await self._lose(fault)

    async def _lose(self, fault: RequestFault) -> Response:
        if fault.how == "timeout":
            await self.account.time.sleep(fault.seconds)
            return _problem(504, "Gateway timeout.")
        if fault.how == "closed":
            return CutReply()
        if fault.how == "502":
            return Response(_PAGE.format(502), 502, media_type="text/html")
        return _problem(500, "Internal error.")

    def _fault(self, route: Route) -> RequestFault | None:
        number, now_s = self._counts[route], self.account.time.elapsed()
        for fault in self.account.script.request:
            is_time = fault.after_s <= now_s < fault.after_s + (fault.for_s or float("inf"))
            if fault.route == route and is_time and (not fault.nth or number in fault.nth):
                return fault
        return None

    async def _answered(self, request: Request, answer: Answer) -> Response:
        try:
            self._check_rights(request)
            return await answer(request)
        except ProblemError as problem:
            return _problem(problem.status, problem.detail, problem.errors)

    def _check_rights(self, request: Request) -> None:
        key = self._key(request)
        pod = self.account.by_key(key)
        own = pod is not None and request.path_params.get("id") == pod.id
        if pod is not None and not (own and request.url.path.endswith("/action")):
            raise ProblemError(403, "This key may only end its own pod.")
        if key.endswith("-read") and request.method != "GET":
            raise ProblemError(403, "This key is read only.")

    # --- pods --------------------------------------------------------------------------------

    async def _create(self, request: Request) -> Response:
        body = read_body(await request.body())
        check_create(body, self.account.kept["templates"])
        pod = self.account.create(body)
        return JSONResponse(pod.show(self.account.time.now()), 201)

    async def _list(self, request: Request) -> Response:
        """Newest first; a page may hold fewer than asked for and still not be the last."""
        now, script = self.account.time.now(), self.account.script
        limit = _whole(request.query_params.get("limit", "1000"), 1, 1000)
        start = _whole(request.query_params.get("cursor", "0"), 0, 10**9)
        pods = [
            pod
            for pod in sorted(self.account.pods.values(), key=lambda one: -one.number)
            if pod.is_listed(now, script.list_lag_s)
        ]
        end = start + min(limit, script.page)
        more = end < len(pods)
        return JSONResponse(
            {
                "pods": [pod.show(now) for pod in pods[start:end]],
                "pagination": {"nextCursor": str(end) if more else None, "hasNextPage": more},
            }
        )

    async def _get(self, request: Request) -> Response:
        return JSONResponse(self._pod(request).show(self.account.time.now()))

    async def _patch(self, request: Request) -> Response:
        """A change of what the container is made of restarts and wipes it."""
        pod, body = self._pod(request), read_body(await request.body())
        unknown = sorted(set(body) - {"name", "image", "args", "disk", "ports", "env", "locked"})
        if unknown:
            wrong = [f"unexpected property {name}" for name in unknown]
            raise ProblemError(422, "The body does not match the schema.", wrong)
        pod.body.update(body)
        if set(body) - {"name", "locked"} and pod.is_alive:
            await self.account.act(pod, "restart")
        return JSONResponse(pod.show(self.account.time.now()))

    async def _delete(self, request: Request) -> Response:
        await self.account.delete(self._pod(request))
        return Response(status_code=204)

    async def _action(self, request: Request) -> Response:
        pod, body = self._pod(request), read_body(await request.body())
        action = body.get("action")
        if action not in ("start", "stop", "restart", "terminate"):
            raise ProblemError(
                422, "The body does not match the schema.", ["action: unknown value"]
            )
        is_own = self.account.by_key(self._key(request)) is pod
        if is_own and action != "terminate":
            raise ProblemError(403, "This key may only end its own pod.")
        await self.account.act(pod, action)
        if action == "terminate":
            return Response(status_code=204)
        return JSONResponse(pod.show(self.account.time.now()))

    async def _logs(self, request: Request) -> Response:
        """Server-sent events that never end; each id is a cursor."""
        pod = self._pod(request)
        source = request.query_params.get("source", "container")
        tail = _whole(request.query_params.get("tail", "100"), 0, 5000)
        last = request.headers.get("last-event-id", "")

        def lines() -> list[str]:
            if source == "system":
                return [line for _, kind, line in pod.log if kind == "system"]
            return pod.container_log()

        async def stream() -> AsyncIterator[str]:
            found = lines()
            sent = int(last) if last.isdigit() else max(0, len(found) - tail)
            while True:
                for number, line in enumerate(lines()[sent:], start=sent + 1):
                    sent = number
                    yield f"id: {number}\ndata: {json.dumps({'message': line})}\n\n"
                await asyncio.sleep(_LOG_LOOK_S)

        return StreamingResponse(stream(), media_type="text/event-stream")

    def _pod(self, request: Request) -> SimulatedPod:
        pod = self.account.pods.get(request.path_params["id"])
        if pod is None or not pod.is_found(self.account.time.now()):
            raise ProblemError(404, "Pod not found.")
        return pod

    # --- catalog -----------------------------------------------------------------------------

    async def _gpus(self, request: Request) -> Response:
        return JSONResponse({"gpus": self._catalog(request)})

    async def _gpu(self, request: Request) -> Response:
        for gpu in self._catalog(request):
            if gpu["id"] == request.path_params["id"]:
                return JSONResponse(gpu)
        raise ProblemError(404, "GPU type not found.")

    def _catalog(self, request: Request) -> list[dict[str, Any]]:
        asked = request.query_params
        if "include" in asked and "product" not in asked:
            raise ProblemError(400, "include needs product.")
        found = self.account.catalog(asked.get("cloud"))
        if asked.get("include") != "AVAILABILITY":
            for gpu in found:
                del gpu["availability"], gpu["dataCenters"]
        return found

    async def _data_centers(self, request: Request) -> Response:
        del request
        names = sorted({stock.data_center for stock in self.account.machines})
        return JSONResponse({"dataCenters": [{"id": name, "name": name} for name in names]})

    # --- the simulator's own -----------------------------------------------------------------

    async def _advance(self, request: Request) -> Response:
        self.account.time.advance(float(read_body(await request.body()).get("seconds", 0)))
        self.account.settle()
        return JSONResponse({"simulated_s": self.account.time.elapsed()})

    async def _report(self, request: Request) -> Response:
        del request
        return JSONResponse(self.report())


class CutReply(Response):
    """An answer that announces more than it sends, so that the connection breaks."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        del scope, receive
        headers = [(b"content-length", b"4096"), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})


def _problem(status: int, detail: str, errors: list[str] | None = None) -> Response:
    body: dict[str, Any] = {"title": "Error", "status": status, "detail": detail}
    if errors:
        body["errors"] = errors
    return JSONResponse(body, status, media_type="application/problem+json")


def _whole(text: str, least: int, most: int) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise ProblemError(422, "A query parameter is out of range.", [f"{text!r}"])
    return int(text)
