"""Requests to the Runpod API: key, limits, retries, and errors by type.

Retries as the vendor's own SDK does them (runpod/typescript-api-sdk `src/retry.ts`): what may be
repeated on 429, 500, 502-504 and broken connections; what may not (POST, PATCH) only on 429, which
says that nothing was done. Four tries, Retry-After at most 60 s.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import SecretStr

from nestling import __version__
from nestling.core.clock import Clock
from nestling.core.errors import ConfigError
from nestling.fleet.providers.runpod_errors import RunpodError, UncertainError, error_of
from nestling.fleet.providers.runpod_limits import RateLimits

__all__ = ["RunpodHttp"]

_log = logging.getLogger(__name__)

_TRIES = 4
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 60.0
_AGAIN = (500, 502, 503, 504)
_REPEATABLE = ("GET", "PUT", "DELETE")


class RunpodHttp:
    """One account's access; close it at the end."""

    def __init__(
        self,
        url: str,
        key: SecretStr,
        clock: Clock,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if not key.get_secret_value():
            raise ConfigError(
                "no Runpod key; expected it in the environment variable RUNPOD_API_KEY; make one "
                "with write access to pods and secrets under Settings, API keys"
            )
        self.limits = RateLimits(clock)
        self._url = url.rstrip("/")
        self._key = key
        self._rng = rng or random.Random()
        # A content network in front refuses some default user agents with an HTML page.
        self._client = httpx.AsyncClient(
            headers={"user-agent": f"nestling/{__version__}"},
            timeout=httpx.Timeout(60.0, connect=15.0),
            transport=transport,
            trust_env=urlsplit(url).scheme == "https",
        )

    async def close(self) -> None:
        """Close the connections; may be called twice."""
        await self._client.aclose()

    async def ask(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str | int] | None = None,
        limit_s: float = 30.0,
    ) -> Any:  # noqa: ANN401 (JSON)
        """The decoded answer, None when it has no body; `limit_s` for each try.

        Raises `RunpodError` by kind; `UncertainError` means that it may have been done.
        """
        failure: RunpodError | None = None
        for number in range(_TRIES):
            if failure is not None:
                await asyncio.sleep(self._pause_s(number, failure))
            await asyncio.sleep(min(self.limits.wait_s(), _MAX_PAUSE_S))
            try:
                return await self._once(method, path, body, params, limit_s)
            except RunpodError as error:
                if not _may_repeat(method, error):
                    raise
                _log.info("%s; trying again", error)
                failure = error
        assert failure is not None
        raise failure

    @asynccontextmanager
    async def lines(
        self, path: str, params: Mapping[str, str | int], headers: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterator[str]]:
        """Lines of an endless stream of events."""
        all_headers = {**self._authorization(), **headers}
        try:
            async with self._client.stream(
                "GET", self._url + path, params=dict(params), headers=all_headers
            ) as reply:
                if not reply.is_success:
                    await reply.aread()
                    raise _error(f"GET {path}", reply)
                yield reply.aiter_lines()
        except httpx.HTTPError as error:
            raise UncertainError(f"GET {path}", detail=type(error).__name__) from error

    async def _once(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        params: Mapping[str, str | int] | None,
        limit_s: float,
    ) -> Any:  # noqa: ANN401 (JSON)
        what = f"{method} {path}"
        try:
            async with asyncio.timeout(limit_s):
                reply = await self._client.request(
                    method,
                    self._url + path,
                    json=body,
                    params=params,
                    headers=self._authorization(),
                )
        except TimeoutError as error:
            raise UncertainError(what, detail=f"no answer within {limit_s:g} s") from error
        except httpx.HTTPError as error:
            detail = f"{type(error).__name__} {error}".strip()
            raise UncertainError(what, detail=detail) from error
        self.limits.note(reply.headers)
        if not reply.is_success:
            raise _error(what, reply)
        if not reply.content:
            return None
        try:
            return reply.json()
        except ValueError as error:
            raise UncertainError(
                what, status=reply.status_code, detail="an answer that is no JSON"
            ) from error

    def _authorization(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._key.get_secret_value()}"}

    def _pause_s(self, number: int, failure: RunpodError) -> float:
        if failure.retry_after_s is not None:
            return min(failure.retry_after_s, _MAX_PAUSE_S)
        doubled_s: float = _FIRST_PAUSE_S * 2 ** (number - 1)
        return doubled_s * self._rng.uniform(0.5, 1.5)


def _may_repeat(method: str, error: RunpodError) -> bool:
    if error.status == 429:
        return True
    uncertain = isinstance(error, UncertainError) and error.status in (0, *_AGAIN)
    return uncertain and method in _REPEATABLE


def _error(what: str, reply: httpx.Response) -> RunpodError:
    """The error of an answer; one that is not the API's own (a page of some proxy) counts as text."""
    detail, errors = reply.text[:500], []
    try:
        problem = json.loads(reply.text)
        if isinstance(problem, dict):
            detail = str(problem.get("detail") or problem.get("title") or detail)
            errors = [str(line) for line in problem.get("errors") or []]
    except ValueError:
        pass
    error = error_of(what, reply.status_code, detail, errors, reply.headers.get("x-request-id", ""))
    after = reply.headers.get("retry-after", "")
    if after.isascii() and after.isdigit():
        error.retry_after_s = float(after)
    return error
