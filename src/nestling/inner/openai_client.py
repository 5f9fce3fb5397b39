"""Many requests to one server at a time: bounded, retried, and answered exactly once each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from nestling.core.errors import JobFailedError
from nestling.inner.openai_config import OpenAiConfig

__all__ = ["ask_all"]

_RETRIED: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_FIRST_WAIT_S: Final = 0.25
_LONGEST_WAIT_S: Final = 20.0
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_MAX_REPLY_BYTES: Final = 8 * 2**20

_Json = dict[str, Any]


def ask_all(
    url: str,
    bodies: Sequence[_Json],
    replies: list[_Json | None],
    *,
    config: OpenAiConfig,
    key: str,
    is_alive: Callable[[], bool],
    rng: random.Random,
) -> None:
    """Fill in the replies that are None; those that stay None were owed by a server that is no longer alive.

    Raises:
        JobFailedError: `scorer.request` (refused), `scorer.server` (no answer after all tries).
    """

    async def run() -> None:
        room = asyncio.Semaphore(config.parallel)
        async with _http(url, config, key) as http, asyncio.TaskGroup() as group:
            for index, body in enumerate(bodies):
                if replies[index] is None:
                    group.create_task(
                        _fill(http, room, body, replies, index, config, is_alive, rng)
                    )

    try:
        asyncio.run(run())
    except* JobFailedError as failed:
        first = failed.exceptions[0]
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


def _http(url: str, config: OpenAiConfig, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(config.request_s, connect=10.0, pool=None),
        limits=httpx.Limits(max_connections=config.parallel),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        trust_env=urlsplit(url).hostname not in _LOOPBACK,
    )


async def _fill(
    http: httpx.AsyncClient,
    room: asyncio.Semaphore,
    body: _Json,
    replies: list[_Json | None],
    index: int,
    config: OpenAiConfig,
    is_alive: Callable[[], bool],
    rng: random.Random,
) -> None:
    """Sampling with a seed may be asked for again; the answer that arrives first is the only one kept."""
    async with room:
        problem = ""
        for attempt in range(config.retries + 1):
            if not is_alive():
                return
            try:
                response = await http.post("/chat/completions", json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if response.status_code == 200:
                    replies[index] = _body(response)
                    return
                problem = f"HTTP {response.status_code}: {response.text[:300]}"
                if response.status_code not in _RETRIED:
                    raise JobFailedError("scorer.request", f"the server refused a turn: {problem}")
            longest = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**attempt)
            await asyncio.sleep(rng.uniform(longest / 2, longest))
        if is_alive():
            raise JobFailedError(
                "scorer.server", f"no answer after {config.retries + 1} tries: {problem}"
            )


def _body(response: httpx.Response) -> _Json:
    try:
        value = response.json() if len(response.content) <= _MAX_REPLY_BYTES else None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise JobFailedError(
            "scorer.protocol", "the server's reply is no JSON object of bearable size"
        )
    return value
