"""Requests to a chat endpoint: retried where that can help, capped in size, tokens and money."""

from __future__ import annotations

import asyncio
import json
import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import httpx
from pydantic import SecretStr

from nestling.agent.policies.endpoint_budget import TokenBudget, Usage
from nestling.agent.policies.endpoint_config import EndpointConfig
from nestling.agent.policies.endpoint_reply import usage_of
from nestling.agent.policy import ContextFullError
from nestling.core.clock import Clock
from nestling.core.errors import NestlingError

__all__ = ["EndpointClient", "EndpointError"]

_MAX_REPLY_BYTES: Final = 8 * 1024 * 1024
_CHARS_PER_TOKEN: Final = 2
"""Few, so that a prompt is never estimated too small."""
_RETRIED: Final = frozenset({408, 425, 429})
_FULL: Final = ("context_length", "context length", "context window", "too many tokens")
_OPTIONAL: Final = ("seed", "temperature", "parallel_tool_calls")
"""Fields that some endpoints refuse and that can be left out."""


class EndpointError(NestlingError):
    """The endpoint is dead, or refuses what is asked; nothing of it reached the episode."""


class _RetryableError(Exception):
    """Trying again may help."""

    def __init__(self, detail: str, *, wait_s: float | None = None) -> None:
        super().__init__(detail)
        self.wait_s = wait_s


class _BrokenReplyError(_RetryableError):
    """The answer was not JSON."""


class EndpointClient:
    """Asks one endpoint; used by many sessions of one event loop."""

    def __init__(
        self,
        config: EndpointConfig,
        http: httpx.AsyncClient,
        *,
        key: SecretStr | None,
        budget: TokenBudget,
        clock: Clock,
    ) -> None:
        self._config = config
        self._http = http
        self._key = key
        self._budget = budget
        self._clock = clock
        self._free = asyncio.Semaphore(config.concurrency)
        self._url = f"{config.url}/chat/completions"
        self._left_out: set[str] = set()

    async def ask(self, body: dict[str, Any], rng: random.Random) -> object:
        """The decoded reply; None when every try gave something that is not JSON.

        Raises:
            ContextFullError: the endpoint says that the messages are too long.
            EndpointError: it is dead, or refuses.
            BudgetSpentError: a cap would be passed.
        """
        config = self._config
        wait_s, num_tries = config.wait_s, 0
        while True:
            try:
                async with self._free:
                    return await self._try(body)
            except _RetryableError as error:
                num_tries += 1
                if num_tries > config.retries:
                    if isinstance(error, _BrokenReplyError):
                        return None
                    raise EndpointError(
                        f"{self._url} did not answer in {num_tries} tries, the last time: {error}; "
                        f"check that it runs and its limits"
                    ) from error
                pause_s = min(wait_s, config.max_wait_s) * (0.5 + 0.5 * rng.random())
                if error.wait_s is not None:
                    # A little later than told, so that not all come back at the same moment.
                    pause_s = error.wait_s + 0.1 * pause_s
                    if error.wait_s > config.max_wait_s:
                        raise EndpointError(
                            f"{self._url} asks to wait {error.wait_s:.0f} s ({error}); the limit is "
                            f"{config.max_wait_s:g} s; raise max_wait_s or come back later"
                        ) from error
                wait_s *= 2
            await asyncio.sleep(pause_s)

    async def _try(self, body: dict[str, Any]) -> object:
        data = self._encoded(body)
        reserved = self._budget.reserve(
            Usage(
                tokens_in=len(data) // _CHARS_PER_TOKEN + 1,
                tokens_out=self._config.max_turn_tokens,
            )
        )
        used: Usage | None = None  # unknown, so all of it, should the answer not arrive
        try:
            status, headers, raw = await self._post(data)
            value = _decoded(raw)
            used = usage_of(value) if status == httpx.codes.OK else Usage()
        finally:
            self._budget.settle(reserved, used)
        if status == httpx.codes.OK:
            if value is None:
                raise _BrokenReplyError("the reply is not JSON")
            return value
        self._raise_for(status, headers, raw)
        return None

    async def _post(self, data: bytes) -> tuple[int, httpx.Headers, bytes]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key.get_secret_value()}"
        raw = bytearray()
        try:
            async with (
                asyncio.timeout(self._config.timeout_s),
                self._http.stream("POST", self._url, content=data, headers=headers) as answer,
            ):
                async for chunk in answer.aiter_bytes():
                    raw += chunk
                    if len(raw) > _MAX_REPLY_BYTES:
                        raise EndpointError(
                            f"{self._url} answered more than {_MAX_REPLY_BYTES} bytes; "
                            f"check that it is a chat endpoint"
                        )
                return answer.status_code, answer.headers, bytes(raw)
        except TimeoutError as error:
            raise _RetryableError(f"no answer within {self._config.timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise _RetryableError(f"{type(error).__name__}: {error}") from error
        except httpx.InvalidURL as error:
            raise EndpointError(f"{self._url} is not a URL: {error}; correct it") from error

    def _encoded(self, body: dict[str, Any]) -> bytes:
        kept = {name: value for name, value in body.items() if name not in self._left_out}
        if "max_tokens" in self._left_out:
            kept["max_completion_tokens"] = body["max_tokens"]
        return json.dumps(kept).encode()  # ASCII, so that half a surrogate pair cannot break it

    def _raise_for(self, status: int, headers: httpx.Headers, raw: bytes) -> None:
        """What a refusal means."""
        detail = self._detail(raw)
        if status in _RETRIED or status >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise _RetryableError(f"{status} {detail}", wait_s=self._retry_after_s(headers))
        if status == httpx.codes.BAD_REQUEST:
            if any(sign in detail.lower() for sign in _FULL):
                raise ContextFullError(f"the endpoint's context is full: {detail}")
            refused = self._refused_field(detail)
            if refused is not None:
                self._left_out.add(refused)
                raise _RetryableError(f"it refuses {refused}", wait_s=0.0)
        fix = "check the model's name and the URL"
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            fix = f"set the environment variable {self._config.key_env} to a valid key"
        raise EndpointError(f"{self._url} answered {status} {detail}; {fix}")

    def _refused_field(self, detail: str) -> str | None:
        """The optional field that a refusal is about."""
        if "max_completion_tokens" in detail and "max_tokens" not in self._left_out:
            return "max_tokens"
        if "support" not in detail and "unknown" not in detail.lower():
            return None
        for name in _OPTIONAL:
            if name in detail and name not in self._left_out:
                return name
        return None

    def _retry_after_s(self, headers: httpx.Headers) -> float | None:
        """Seconds that `Retry-After` asks for, in either of its two forms."""
        text = headers.get("retry-after", "").strip()
        if not text:
            return None
        try:
            return max(0.0, float(text))
        except ValueError:
            pass
        try:
            then = parsedate_to_datetime(text)
        except ValueError:
            return None
        now = datetime.fromtimestamp(self._clock.now(), UTC)
        return max(0.0, (then.replace(tzinfo=then.tzinfo or UTC) - now).total_seconds())

    def _detail(self, raw: bytes) -> str:
        """One line of a refusal, without the key should it be repeated there."""
        text = raw.decode("utf-8", "replace")
        value = _decoded(raw)
        error = value.get("error") if isinstance(value, dict) else None
        if isinstance(error, dict):
            said = (error.get("code"), error.get("param"), error.get("message"))
            text = " ".join(str(part) for part in said if part)
        if self._key is not None:
            text = text.replace(self._key.get_secret_value(), "***")
        return " ".join(text.split())[:300]


def _decoded(raw: bytes) -> Any | None:  # noqa: ANN401 (any JSON)
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
