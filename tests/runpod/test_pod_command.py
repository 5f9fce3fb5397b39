"""Pods that nothing holds back from ending: not a broken image, not a process that cannot be killed."""

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

from nestling.fleet.pods import child as pod_child
from nestling.fleet.pods.child import PodChild, PodFolder
from nestling.fleet.providers.runpod_request import pod_command

from .conftest import open_pods, simulated, until


def python_in(folder: Path, options: str) -> str:
    """PATH with this Python as `python`, called with `options`."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {options} "$@"\n')
    python.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("install", [["verifiers==0.4.0"], []], ids=["install", "image"])
def test_pod_without_the_worker_ends_itself(install: list[str], tmp_path: Path) -> None:
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

    with HTTPServer(("127.0.0.1", 0), Account) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {
            "PATH": python_in(tmp_path, "-I -S"),  # the standard library alone
            "NESTLING_POD": json.dumps({"api_url": f"http://127.0.0.1:{server.server_port}/v2"}),
            "RUNPOD_POD_ID": "pod7",
            "RUNPOD_API_KEY": "its-key",
        }
        pod = subprocess.Popen(
            pod_command(install, give_up_s=0.0),
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "install"),
    [
        ("empty_image", []),
        ("empty_image", ["verifiers==0.4.0"]),
        ("install_hangs", ["verifiers==0.4.0"]),
    ],
    ids=["image", "install ends empty", "install hangs"],
)
async def test_simulated_pod_that_cannot_start_ends_itself_without_a_controller(
    fault: str, install: list[str], tmp_path: Path
) -> None:
    async with simulated(tmp_path, pod=[{"pods": [1], "do": fault}]) as simulator:
        patience = {"boot_s": 0.3, "lost_controller_s": 0.3, "tick_s": 60.0}
        settings = {"simulator": simulator, "install": install, **patience}
        async with open_pods(tmp_path, None, closes=False, **settings) as room:
            await room.provider.keeper.maker.obtain(set())
            await room.provider.detach()
        [pod] = simulator.app.account.pods.values()
        await until(lambda: pod.deleted_at is not None)
        asked = [path for method, path, _ in simulator.app.seen.requests if method != "GET"]
        assert asked[-1] == f"/v2/pods/{pod.id}/action"
        assert pod.num_starts == 1


@pytest.mark.long
def test_pod_with_the_worker_starts_it(tmp_path: Path) -> None:
    """It has been told nothing and has no account to ask, so it says that and exits."""
    done = subprocess.run(
        pod_command([], give_up_s=30.0),
        env={"PATH": python_in(tmp_path, "")},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    assert "NESTLING_POD does not say whose pod this is" in done.stderr


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
