"""Addresses of the dashboard.

It answers GET only, reads run stores only, and where there is a token sends nothing without it.
Pages hold text that agents wrote: the policy forbids every script and style that is not ours.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nestling.core.clock import Clock
from nestling.core.errors import StoreError
from nestling.dash.listing import Asked
from nestling.dash.live_run import LiveRun
from nestling.dash.pages import Pages, RunLine
from nestling.dash.runs import find_runs
from nestling.dash.story import read_story
from nestling.report.listings import episode_table, job_table, step_listing
from nestling.store import RunStore

__all__ = ["COOKIE", "DashApp"]

COOKIE: Final = "nestling_dash"
_NUM_WARM: Final = 8
_POLL_S: Final = 0.4
_KEEP_ALIVE_S: Final = 15.0

_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_ASSETS: Final = {
    "dash.css": "text/css; charset=utf-8",
    "dash.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}

_TABLES: Final = {"steps.csv": step_listing, "episodes.csv": episode_table, "jobs.csv": job_table}


class DashApp:
    """The pages over one folder of runs; `asgi` is what a server runs."""

    def __init__(self, where: Path, clock: Clock, *, token: str | None, hosts: list[str]) -> None:
        """`hosts`: names it may be called by; `*` allows any, for servers with a token."""
        self._where = where
        self._clock = clock
        self._token = token
        self._pages = Pages()
        self._runs: dict[str, LiveRun] = {}
        self._is_closing = False
        routes = [
            Route("/", self._list),
            Route("/assets/{name}", _asset),
            Route("/runs/{key}", self._overview),
            Route("/runs/{key}/steps", self._steps),
            Route("/runs/{key}/steps/{step:int}", self._step),
            Route("/runs/{key}/episodes", self._episodes),
            Route("/runs/{key}/episodes/{episode:path}", self._episode),
            Route("/runs/{key}/fleet", self._fleet),
            Route("/runs/{key}/held-out", self._held_out),
            Route("/runs/{key}/alerts", self._alerts),
            Route("/runs/{key}/events", self._events),
            Route("/runs/{key}/{name}", self._table),
        ]
        app = Starlette(
            routes=routes,
            middleware=[
                Middleware(TrustedHostMiddleware, allowed_hosts=hosts),
                Middleware(_SafeHeaders),
                Middleware(GZipMiddleware, minimum_size=2048),
            ],
            exception_handlers={HTTPException: self._http_error, StoreError: self._store_error},
        )
        self.asgi: ASGIApp = _Guard(app, token) if token else app

    def close(self) -> None:
        """End the open event streams, so that a server can stop."""
        self._is_closing = True

    def warm(self) -> None:
        """Read the newest runs now, so that their first page need not wait for it."""
        for key, folder in list(find_runs(self._where).items())[:_NUM_WARM]:
            with suppress(StoreError):  # its page says what is wrong
                self._kept(key, folder).view()

    def _run(self, key: str) -> LiveRun:
        """The run of this name; only names that a search of the folder found are ever opened."""
        folder = find_runs(self._where).get(key)
        if folder is None:
            self._runs.pop(key, None)
            raise HTTPException(404, f"There is no run {key!r} in {self._where}.")
        return self._kept(key, folder)

    def _kept(self, key: str, folder: Path) -> LiveRun:
        """What is known of a run that a search found; one per run, as requests share its reading."""
        return self._runs.setdefault(key, LiveRun(key, folder, self._clock))

    async def _list(self, request: Request) -> Response:
        del request
        return HTMLResponse(await asyncio.to_thread(self._list_page))

    def _list_page(self) -> str:
        lines = []
        for key, folder in find_runs(self._where).items():
            try:
                lines.append(RunLine(key=key, view=self._kept(key, folder).view()))
            except StoreError as error:
                lines.append(RunLine(key=key, view=None, error=str(error)))
        return self._pages.runs(lines)

    async def _overview(self, request: Request) -> Response:
        return await self._page(request, lambda run: self._pages.overview(run.view()))

    async def _steps(self, request: Request) -> Response:
        return await self._page(request, lambda run: self._pages.steps(run.view()))

    async def _step(self, request: Request) -> Response:
        number = int(request.path_params["step"])
        return await self._page(request, lambda run: self._pages.step(run.view(), number))

    async def _episodes(self, request: Request) -> Response:
        asked = Asked.of(request.query_params)
        return await self._page(request, lambda run: self._pages.episodes(run.view(), asked))

    async def _episode(self, request: Request) -> Response:
        episode_id = str(request.path_params["episode"])

        def page(run: LiveRun) -> str | None:
            view = run.view()
            with RunStore.open_reader(run.folder.database) as store:
                try:
                    store.episodes.get(episode_id)
                except StoreError:
                    return None
                story = read_story(run.folder, store, episode_id)
            return self._pages.episode(view, story)

        return await self._page(request, page)

    async def _fleet(self, request: Request) -> Response:
        return await self._page(request, lambda run: self._pages.fleet(run.view()))

    async def _held_out(self, request: Request) -> Response:
        return await self._page(request, lambda run: self._pages.held_out(run.view()))

    async def _alerts(self, request: Request) -> Response:
        return await self._page(request, lambda run: self._pages.alerts(run.view()))

    async def _page(self, request: Request, render: Callable[[LiveRun], str | None]) -> Response:
        key = str(request.path_params["key"])
        text = await asyncio.to_thread(lambda: render(self._run(key)))
        if text is None:
            raise HTTPException(404, "This run has no such thing.")
        return HTMLResponse(text)

    async def _table(self, request: Request) -> Response:
        make = _TABLES.get(str(request.path_params["name"]))
        if make is None:
            raise HTTPException(404, "There is no such page.")
        key = str(request.path_params["key"])
        text = await asyncio.to_thread(lambda: make(self._run(key).view().data).csv())
        return PlainTextResponse(text, media_type="text/csv")

    async def _events(self, request: Request) -> Response:
        """Server-sent: one message with the position of the newest event whenever it moves."""
        run = await asyncio.to_thread(self._run, str(request.path_params["key"]))
        return StreamingResponse(self._changes(run), media_type="text/event-stream")

    async def _changes(self, run: LiveRun) -> AsyncIterator[str]:
        told: int | None = None
        silent_s = 0.0
        while not self._is_closing:
            try:
                seq = await asyncio.to_thread(run.seq)
            except StoreError as error:
                yield f"event: lost\ndata: {json.dumps(str(error))}\n\n"
                return
            if seq != told:
                told, silent_s = seq, 0.0
                yield f"event: change\ndata: {seq}\n\n"
            elif silent_s >= _KEEP_ALIVE_S:
                silent_s = 0.0
                yield ": still here\n\n"
            await asyncio.sleep(_POLL_S)
            silent_s += _POLL_S

    async def _http_error(self, request: Request, error: Exception) -> Response:
        del request
        assert isinstance(error, HTTPException)
        title = "Not found" if error.status_code == 404 else "That did not work"
        page = self._pages.problem(error.status_code, title, error.detail)
        return HTMLResponse(page, status_code=error.status_code, headers=error.headers)

    async def _store_error(self, request: Request, error: Exception) -> Response:
        del request
        return HTMLResponse(
            self._pages.problem(503, "The run cannot be read", str(error)), status_code=503
        )


async def _asset(request: Request) -> Response:
    name = str(request.path_params["name"])
    if name not in _ASSETS:
        raise HTTPException(404, "There is no such file.")
    data = resources.files("nestling.dash").joinpath("static", name).read_bytes()
    return Response(data, media_type=_ASSETS[name])


class _SafeHeaders:
    """Adds the security headers to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), text.encode()) for name, text in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        await self._app(scope, receive, guarded if scope["type"] == "http" else send)


class _Guard:
    """Lets in who has the token: once in the address, from then on in a cookie, or as a bearer."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_right(request.cookies.get(COOKIE, "")) or self._is_right(bearer):
            await self._app(scope, receive, send)
            return
        response: Response = PlainTextResponse(
            "This dashboard asks for a token: open the address that `nestling dash` printed.\n",
            status_code=401,
            headers=_HEADERS,
        )
        if self._is_right(request.query_params.get("token", "")):
            response = RedirectResponse(request.url.path, status_code=303, headers=_HEADERS)
            response.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
        await response(scope, receive, send)

    def _is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())
