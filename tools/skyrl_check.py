"""Check the Tinker learner against a real Tinker-compatible server: SkyRL 0.3.0 with SDK 0.24.1, on CPU.

Usage: python tools/skyrl_check.py [PYTEST ARGUMENT ...]

Makes two environments below .peers/ (server and client: their needs do not fit together), copies the
shipped agent as float32, starts the server on a free port, runs tests/outer/test_skyrl.py in the client
and stops the server. The first run installs about 4 GB; after that it takes about 10 minutes on two idle
cores, most of it the server's compiler.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from peer_env import ROOT, make_env

AGENT = ROOT / "src/nestling/agent/weights/hatchling"
SERVER = ("skyrl[tinker,jax]==0.3.0", "tinker==0.24.1")
CLIENT = ("tinker==0.24.1", "tinker-cookbook==0.5.2")
# SkyRL 0.3.0 uses typing.TypedDict with pydantic, which Python before 3.12 does not allow.
SHIM = "import typing, typing_extensions\ntyping.TypedDict = typing_extensions.TypedDict\n"
SETTINGS = {
    "max_lora_adapters": 24,  # every client that connects takes one until its session is stale
    "max_lora_rank": 8,
    "train_micro_batch_size": 4,
    "sample_max_num_sequences": 4,
}
START_S = 300.0


def main(arguments: list[str]) -> int:
    """Exit code of the tests."""
    server = make_env(ROOT / ".peers" / "skyrl-server", SERVER, ours=False)
    client = make_env(ROOT / ".peers" / "skyrl-client", CLIENT, ours=True)
    if sys.version_info < (3, 12):
        for packages in (server.parent.parent / "lib").glob("python3.*/site-packages"):
            (packages / "sitecustomize.py").write_text(SHIM)
    with tempfile.TemporaryDirectory(prefix="nestling-skyrl-") as scratch:
        work = Path(scratch)
        model = work / "agent"
        subprocess.run([str(client), "-c", COPY, str(AGENT), str(model)], check=True)
        port = _free_port()
        running = _start(server, model, work, port)
        try:
            _wait(running, port, work / "server.log")
            environment = {
                **os.environ,
                "NESTLING_SKYRL_URL": f"http://127.0.0.1:{port}",
                "NESTLING_SKYRL_MODEL": str(model),
                "NESTLING_SKYRL_CHECKPOINTS": str(work / "checkpoints"),
                "TINKER_API_KEY": "tml-local",
                "TINKER_TELEMETRY": "0",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            }
            # The SDK leaves sockets open at the end, which this project's settings call an error.
            command = [str(client), "-m", "pytest", "-W", "ignore", "-v", "-m", "live"]
            command += ["--timeout=3600", "tests/outer/test_skyrl.py", *arguments]
            return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        finally:
            os.killpg(running.pid, signal.SIGTERM)
            try:
                running.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)


COPY = """
import json, sys
from pathlib import Path
from safetensors.torch import load_file, save_file
source, target = map(Path, sys.argv[1:])
target.mkdir(parents=True)
for path in source.glob("*.json"):
    (target / path.name).write_bytes(path.read_bytes())
config = json.loads((target / "config.json").read_text()) | {"dtype": "float32"}
(target / "config.json").write_text(json.dumps(config))
tensors = {name: one.float().contiguous() for name, one in load_file(source / "model.safetensors").items()}
save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
"""


def _start(python: Path, model: Path, work: Path, port: int) -> subprocess.Popen[bytes]:
    """The server reads its parent's command line and expects `uv run ... -m skyrl.tinker.api`."""
    command = ["uv", "run", "--no-project", "--offline", "--python", str(python)]
    command += ["-m", "skyrl.tinker.api", "--backend", "jax", "--base-model", str(model)]
    command += [
        "--backend-config",
        json.dumps(SETTINGS),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--checkpoints-base", str(work / "checkpoints")]
    command += ["--database-url", f"sqlite:///{work / 'server.db'}"]
    environment = {
        **os.environ,
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with (work / "server.log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=work, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def _wait(running: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/healthz", timeout=5):
                return
        except OSError:
            if running.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(1)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
