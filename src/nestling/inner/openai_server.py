"""The server that samples: started here when it is needed and ended when it is not, or kept by somebody else."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import httpx

from nestling.core.clock import Clock
from nestling.core.errors import ConfigError, JobFailedError
from nestling.inner.disk import writing
from nestling.inner.kept_process import KeptProcess
from nestling.inner.openai_config import OpenAiConfig

__all__ = ["MAX_LORA_RANK", "OwnServer", "command_of", "version_of"]

MAX_LORA_RANK: Final = 64
"""The largest rank that a job may choose."""
_LOOK_S: Final = 0.1
_LOG_TAIL_BYTES: Final = 2000
_VERSION_S: Final = 120.0


def command_of(config: OpenAiConfig, model: Path, name: str, port: int, max_len: int) -> list[str]:
    """What starts the server: `model` as `name`, on loopback, `max_len` tokens a conversation."""
    common = ["--host", "127.0.0.1", "--port", str(port)]
    if config.kind == "nestling":
        more = ["--name", name, "--slots", str(config.parallel), "--max-len", str(max_len)]
        return [*_program(config), "serve", str(model), *common, *more, *config.arguments]
    # The pinned base's own template and tokenizer; sampling is what the request says and nothing else.
    more = ["--served-model-name", name, "--max-model-len", str(max_len), "--dtype", "bfloat16"]
    more += [
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
        "--generation-config",
        "vllm",
    ]
    more += ["--enable-lora", "--max-lora-rank", str(MAX_LORA_RANK)]
    return [*_program(config), "serve", str(model), *common, *more, *config.arguments]


def version_of(config: OpenAiConfig) -> str:
    """What tells one server's results from another's: the program's version, or the address.

    Raises:
        ConfigError: the program cannot be run.
    """
    if config.kind == "url":
        return config.url
    try:
        done = subprocess.run(  # noqa: S603 (the program of the recipe)
            [*_program(config), "--version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"`{_program(config)[0]} --version` does not work: {error}; expected a {config.kind} command; "
            "set inner.openai.program to its path"
        ) from error
    return done.stdout.strip()


class OwnServer:
    """One model behind one process; used from one thread."""

    def __init__(
        self, config: OpenAiConfig, model: Path, name: str, max_len: int, clock: Clock
    ) -> None:
        self.model = model
        self.name = name
        self._config = config
        self._max_len = max_len
        self._clock = clock
        with writing("scorer.disk", Path(tempfile.gettempdir())):
            self._folder = Path(tempfile.mkdtemp(prefix="nestling-served-"))
        self._process: KeptProcess | None = None
        self.url = ""

    def start(self) -> None:
        """Blocks until it answers; does nothing while it runs.

        Raises:
            ConfigError: the program does not exist.
            JobFailedError: `scorer.server`, when it ends or does not answer within `start_s`.
        """
        if self.is_alive():
            return
        self.stop()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = command_of(self._config, self.model, self.name, port, self._max_len)
        # So that adapters can be given to a running server; see vLLM's documentation on LoRA.
        environment = dict(os.environ) | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
        self._process = KeptProcess(command, environment, self._folder, self._log)
        self.url = f"http://127.0.0.1:{port}/v1"
        limit_s = self._clock.monotonic() + self._config.start_s
        with httpx.Client(trust_env=False, timeout=5.0) as http:
            while not self._answers(http):
                if self._process.ended(_LOOK_S) is not None:
                    raise JobFailedError(
                        "scorer.server", f"the server ended at its start: {self.last_words()}"
                    )
                if self._clock.monotonic() > limit_s:
                    words = self.last_words()
                    self.stop()
                    raise JobFailedError(
                        "scorer.server",
                        f"the server does not answer after {self._config.start_s:g} s: {words}",
                    )

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.ended(0.0) is None

    def last_words(self) -> str:
        """The end of its log."""
        try:
            return self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        except OSError:
            return ""

    def stop(self) -> None:
        """End it, and all that it started; may be called twice."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def close(self) -> None:
        """`stop`, and forget its log."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _log(self) -> Path:
        return self._folder / "server.log"

    def _answers(self, http: httpx.Client) -> bool:
        try:
            answer = http.get(f"{self.url}/models")
            return answer.status_code == 200 and self.name in {
                one.get("id") for one in answer.json()["data"]
            }
        except (httpx.TransportError, ValueError, KeyError, AttributeError, TypeError):
            return False


def _program(config: OpenAiConfig) -> list[str]:
    if config.kind == "nestling" and not config.program:
        return [sys.executable, "-P", "-m", "nestling"]
    name = config.program or config.kind
    found = shutil.which(name)
    if found is None:
        raise ConfigError(
            f"inner.openai.program = {name!r} cannot be run; expected the {config.kind} command, a name on PATH or a "
            "path; install it (docs/prime-rl.md) and set its path"
        )
    return [found]
