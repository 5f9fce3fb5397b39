"""Pods that nothing holds back from ending: not a failed install, not a process that cannot be killed."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from nestling.fleet import pod_child
from nestling.fleet.pod_child import PodChild, PodFolder
from nestling.fleet.providers.runpod_request import pod_command


def test_pod_that_cannot_install_ends_itself(tmp_path: Path) -> None:
    """A container whose command exits is started again and billed on, whoever watches."""
    asked: queue.Queue[tuple[str, str, dict[str, str]]] = queue.Queue()

    class Account(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.put((self.path, self.headers["authorization"], body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    python = tmp_path / "python"
    real = shlex.quote(sys.executable)
    python.write_text(
        f'#!/bin/sh\n[ "$2" = pip ] && exit 1\n[ "$1" = -c ] || exit 7\nexec {real} "$@"\n'
    )
    python.chmod(0o755)
    with HTTPServer(("127.0.0.1", 0), Account) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "NESTLING_POD": json.dumps({"api_url": f"http://127.0.0.1:{server.server_port}/v2"}),
            "RUNPOD_POD_ID": "pod7",
            "RUNPOD_API_KEY": "its-key",
        }
        pod = subprocess.Popen(
            pod_command(["verifiers==0.4.0"], give_up_s=0.0),
            env=environment,
            start_new_session=True,
        )
        try:
            seen = asked.get(timeout=40)
            assert seen == ("/v2/pods/pod7/action", "Bearer its-key", {"action": "terminate"})
            assert pod.poll() is None  # it asks again until it is gone
        finally:
            os.killpg(pod.pid, signal.SIGKILL)
            pod.wait()
            server.shutdown()


class Stuck:
    """A process in an uninterruptible call, as one that waits for a broken GPU may be."""

    pid = 2**22 + 1  # above any that exists
    stdin = None

    async def wait(self) -> int:
        return await asyncio.get_running_loop().create_future()


async def test_worker_process_that_does_not_die_does_not_hold_its_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_child, "_STOP_S", 0.05)
    child = PodChild(1, Stuck(), "pod/none", PodFolder(tmp_path))
    async with asyncio.timeout(20):
        await child.end()
