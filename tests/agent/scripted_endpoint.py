"""A chat endpoint on loopback that answers by a script, in a thread; plain HTTP/1.1."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from nestling.engine.chat import render_call

__all__ = ["Answer", "Endpoint", "call", "endpoint", "said"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One scripted reply."""

    status: int = 200
    body: Any = None
    """JSON, or raw bytes."""
    headers: dict[str, str] = field(default_factory=dict)
    hang: bool = False
    """Say nothing until the server ends."""
    cut: bool = False
    """Promise more bytes than are sent."""


def said(content: Any = None, *, finish: str = "stop", usage: Any = None, **message: Any) -> Answer:
    """A well-formed completion."""
    full = {"role": "assistant", "content": content, **message}
    body = {"choices": [{"index": 0, "message": full, "finish_reason": finish}]}
    if usage is not None:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return Answer(body=body)


def call(name: Any, arguments: Any = "{}", *, text: bool = False, **more: Any) -> Answer:
    """A completion that asks for a tool, structured or as text."""
    if text:
        return said(render_call(name, json.loads(arguments)), **more)
    function = {"name": name, "arguments": arguments}
    return said(tool_calls=[{"id": "abc", "type": "function", "function": function}], **more)


@dataclass(slots=True, kw_only=True)
class Endpoint:
    """A running server and what it was asked."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released with each request."""


@contextmanager
def endpoint(
    script: Sequence[Answer], *, gate: threading.Event | None = None
) -> Iterator[Endpoint]:
    """Answer requests in order; the last answer is repeated. `gate` holds all answers back."""
    ending, lock = threading.Event(), threading.Lock()
    running = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            nonlocal running
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                place = len(known.requests)
                known.requests.append(json.loads(raw))
                known.headers.append({k.lower(): v for k, v in self.headers.items()})
                running += 1
                known.most_at_once = max(known.most_at_once, running)
            known.arrived.release()
            if gate is not None:
                gate.wait(20)
            answer = script[min(place, len(script) - 1)]
            if answer.hang:
                ending.wait(20)
                self.close_connection = True
            else:
                self._reply(answer)
            with lock:
                running -= 1

        def _reply(self, answer: Answer) -> None:
            is_raw = isinstance(answer.body, bytes)
            data = answer.body if is_raw else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            self.send_header("Content-Length", str(len(data) + (50 if answer.cut else 0)))
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
            self.close_connection = answer.cut

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    known = Endpoint(url=f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield known
    finally:
        ending.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
