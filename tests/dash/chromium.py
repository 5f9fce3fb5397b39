"""A dashboard in a thread, and Debian's Chromium without a window to look at it.

The browser is driven through its DevTools pipe, so that there is nothing to install beside it.

Messages are JSON, ended by a zero byte, on file descriptors 3 (to it) and 4 (from it):
https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nestling.dash.server import DashConfig, listening

NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_S = 60.0
"""A loaded machine is slow; a condition that holds is seen at once."""


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A dashboard over a folder while the block lasts; gives its address without the last slash."""
    told: queue.Queue[str] = queue.Queue()
    loop = asyncio.new_event_loop()
    ends = asyncio.Event()

    async def run() -> None:
        async with listening(folder, DashConfig(port=0)) as server:
            told.put(server.address.rstrip("/"))
            await ends.wait()

    def work() -> None:
        loop.run_until_complete(run())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield told.get(timeout=60)
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join(30)
        assert not thread.is_alive()


class Chromium:
    """One browser with one page."""

    def __init__(self) -> None:
        program = find_chromium()
        assert program is not None
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_it, self._out = os.pipe()
        self._in, from_it = os.pipe()
        command = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            "--force-color-profile=srgb",
            f"--user-data-dir={self._profile.name}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_it} 4>&{from_it}', "bash", *command],
            pass_fds=(to_it, from_it),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_it)
        os.close(from_it)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.said: list[str] = []
        """Errors and messages of the page's console."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._in, 1 << 16)
            assert chunk, "the browser is gone"
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.said.append(json.dumps(message["params"]["exceptionDetails"])[:500])
            case "Log.entryAdded":
                self.said.append(json.dumps(message["params"]["entry"])[:500])
            case "Page.javascriptDialogOpening":
                self.said.append(f"dialog: {message['params']['message']}")
        return message

    def js(self, expression: str) -> Any:
        """Value of an expression in the page; waits for a promise."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """The value of an expression once it is true."""
        end = time.monotonic() + WAIT_S
        while True:
            value = self.js(expression)
            if value:
                return value
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)

    def open(self, address: str, ready: str = "true") -> None:
        """Go to an address; returns when its document is there and `ready` is true."""
        before = self.js("performance.timeOrigin")
        self.send("Page.navigate", url=address)
        loaded = f"performance.timeOrigin !== {before} && document.readyState === 'complete'"
        self.wait(f"{loaded} && Boolean({ready})")

    def press(self, key: str, text: str = "") -> None:
        code = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}.get(key, 0)
        kind = "keyDown" if text or key == "Enter" else "rawKeyDown"
        more = {"text": text or "\r"} if kind == "keyDown" else {}
        self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def write(self, text: str) -> None:
        """Type into what has the focus."""
        self.send("Input.insertText", text=text)

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path, *, whole: bool = True) -> Path:
        """A screenshot of the page, as long as it is, or of what the window shows."""
        more: dict[str, Any] = {}
        if whole:
            size = self.send("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000)}
            more = {"captureBeyondViewport": True, "clip": {**clip, "scale": 1}}
        data = self.send("Page.captureScreenshot", format="png", **more)["data"]
        path.write_bytes(base64.b64decode(data))
        return path
