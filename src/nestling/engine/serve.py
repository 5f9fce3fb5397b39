"""An OpenAI-compatible server over one of our models: `/v1/models` and `/v1/chat/completions`.

Tools, `tool_calls` in the reply, log-probabilities of the sampling distribution, seeds, streaming. It
listens on loopback without a token; anywhere else a token is required of every request.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nestling.core.clock import Clock, SystemClock
from nestling.core.errors import ConfigError, ModelError, NestlingError
from nestling.core.listening import base_url, bound_socket
from nestling.core.seeds import derive_seed
from nestling.engine.checkpoint import load_model
from nestling.engine.model import Model
from nestling.engine.serve_answer import Answer
from nestling.engine.serve_chat import (
    ApiError,
    ChatRequest,
    History,
    parse_request,
)
from nestling.engine.serve_sampling import BusyError, Piece, SamplingRequest, SamplingThread

__all__ = ["LOOPBACK", "ChatServer", "ServeConfig", "serve", "shows_tools"]

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_MAX_BODY_BYTES: Final = 8 * 1024 * 1024
_MAX_LEN: Final = 8192
"""Caches are taken at the start: 16 conversations of 32 k would be gigabytes of a small model."""

ToolPrompt = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How a model is served."""

    name: str
    """Id of the model in the API."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    token: str | None = None
    """Asked for as a bearer token; required when `host` is not loopback."""
    num_slots: int = 16
    """Conversations that are decoded together and keep their cache."""
    max_len: int = 0
    """Tokens of one conversation; 0: as many as the model takes, up to 8192."""
    max_waiting: int = 256
    """Open requests; more are answered 429."""
    shows_tools: bool = True
    """Tools go into the prompt; not for models that were never shown any."""

    def __post_init__(self) -> None:
        if self.host not in LOOPBACK and not self.token:
            raise ConfigError(
                f"host {self.host} can be reached from outside; expected a token for it; set the "
                f"environment variable of the token, or listen on 127.0.0.1"
            )


def shows_tools(folder: Path, tool_prompt: ToolPrompt = "auto") -> bool:
    """Whether the prompt names the tools; `auto`: when the model's own chat template does."""
    if tool_prompt != "auto":
        return tool_prompt == "always"
    templates = []
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            templates.append(path.read_text("utf-8", errors="replace"))
    return any("tools" in text for text in templates)


async def serve(
    folder: Path,
    config: ServeConfig,
    told: Callable[[str], None],
    *,
    device: str = "cpu",
    clock: Clock | None = None,
) -> None:
    """Serve until the process is told to end (SIGINT, SIGTERM); `told` gets the base URL."""
    server = ChatServer(load_model(folder, device), config, clock or SystemClock())
    try:
        async with server.listening() as url:
            told(url)
            await server.ended()
    finally:
        server.close()


class ChatServer:
    """One model behind HTTP. Takes over `model`; `close` it at the end."""

    def __init__(self, model: Model, config: ServeConfig, clock: Clock) -> None:
        self._config = config
        self._tokenizer = model.tokenizer
        self._clock = clock
        most = model.config.max_positions
        if config.max_len > most:
            raise ConfigError(
                f"max_len={config.max_len}; expected at most {most}, as the model takes"
            )
        self._sampling = SamplingThread(
            model,
            num_slots=config.num_slots,
            max_len=config.max_len or min(most, _MAX_LEN),
            max_waiting=config.max_waiting,
        )
        self._history = History(model.tokenizer, shows_tools=config.shows_tools)
        self._num_requests = 0
        # A restart must not repeat the seeds of requests that brought none.
        self._root_seed = secrets.randbits(63)
        self._task: asyncio.Task[None] | None = None
        self.app = self._make_app()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Accept connections inside the block; gives the base URL, ending in `/v1`.

        Raises `ConfigError` when the port is taken.
        """
        config = self._config
        taken = bound_socket(config.host, config.port)
        url = f"{base_url(config.host, taken)}/v1"
        running = uvicorn.Server(
            uvicorn.Config(
                self.app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=5,
            )
        )
        async with asyncio.TaskGroup() as group:
            self._task = group.create_task(running.serve(sockets=[taken]))
            while not running.started and not self._task.done():  # noqa: ASYNC110 (a flag is all there is)
                await asyncio.sleep(0.005)
            try:
                yield url
            finally:
                running.should_exit = True

    async def ended(self) -> None:
        """Wait until the server was told to end."""
        assert self._task is not None
        await asyncio.wait([self._task])

    def close(self) -> None:
        """End the sampling thread; may be called twice."""
        self._sampling.close()

    def _make_app(self) -> Starlette:
        guards = []
        if self._config.host in ("127.0.0.1", "localhost"):
            # A web page must not reach us by a name that it lets point here.
            guards.append(
                Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
            )
        return Starlette(
            routes=[
                Route("/health", _health),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._completions, methods=["POST"]),
            ],
            middleware=guards,
            exception_handlers={
                ApiError: _api_error,
                404: _not_found,
                405: _not_found,
                500: _internal,
            },
        )

    async def _models(self, request: Request) -> Response:
        self._check_token(request)
        entry = {"id": self._config.name, "object": "model", "created": 0, "owned_by": "nestling"}
        entry["max_model_len"] = self._sampling.max_len
        return JSONResponse({"object": "list", "data": [entry]})

    async def _completions(self, request: Request) -> Response:
        self._check_token(request)
        asked = parse_request(await _body(request))
        if asked.model and asked.model != self._config.name:
            raise ApiError(
                f"the model {asked.model!r} does not exist; this server has {self._config.name!r}",
                status=404,
                code="model_not_found",
                param="model",
            )
        answer = self._start(asked)
        if asked.stream:
            return StreamingResponse(answer.events(), media_type="text/event-stream")
        return JSONResponse(await answer.whole(request.is_disconnected))

    def _start(self, asked: ChatRequest) -> Answer:
        """Queue the turn; what cannot be served is refused here."""
        prompt = self._history.prompt(asked)
        room = self._sampling.max_len - len(prompt)
        if room < 1:
            raise ApiError(
                f"the maximum context length is {self._sampling.max_len} tokens, the messages have "
                f"{len(prompt)}; shorten them",
                code="context_length_exceeded",
                param="messages",
            )
        self._num_requests += 1
        number = self._num_requests
        if asked.seed is not None:
            seed = asked.seed % 2**63
        else:
            seed = derive_seed(self._root_seed, "request", number)
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        limit = asked.max_completion_tokens or asked.max_tokens or room
        request = SamplingRequest(
            ids=tuple(prompt),
            seed=seed,
            max_tokens=min(limit, room),
            temperature=1.0 if asked.temperature is None else asked.temperature,
            tell=lambda piece: _tell(loop, pieces, piece),
        )
        try:
            self._sampling.submit(request)
        except BusyError as error:
            raise ApiError(str(error), status=429, kind="rate_limit_error", code="busy") from error
        except ModelError as error:
            raise ApiError(str(error), param="messages") from error
        head = {
            "id": f"chatcmpl-{number:08d}",
            "created": int(self._clock.now()),
            "model": self._config.name,
        }
        return Answer(self._history, self._tokenizer, asked, request, pieces, head)

    def _check_token(self, request: Request) -> None:
        token = self._config.token
        given = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise ApiError(
                "the token is missing or wrong; send it as `Authorization: Bearer ...`",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
            )


def _tell(loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue[Piece], piece: Piece) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(pieces.put_nowait, piece)


async def _body(request: Request) -> bytes:
    """The body, when it is JSON of a bearable size. Plain forms of web pages are refused by type."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError("the content type must be application/json", status=415)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_BODY_BYTES:
                raise ApiError(f"the body is longer than {_MAX_BODY_BYTES} bytes", status=413)
    except ClientDisconnect as error:
        raise ApiError("the client left") from error
    return bytes(body)


async def _health(request: Request) -> Response:
    del request
    return JSONResponse({"status": "ok"})


async def _api_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, ApiError)
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error.body, status_code=error.status, headers=headers)


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    wrong = ApiError(f"{request.method} {request.url.path} is not served here", status=status)
    return JSONResponse(wrong.body, status_code=status)


async def _internal(request: Request, error: Exception) -> Response:
    del request
    name = type(error).__name__ if not isinstance(error, NestlingError) else str(error)
    wrong = ApiError(f"the server failed: {name}", status=500, kind="server_error")
    return JSONResponse(wrong.body, status_code=500)
