"""What a person may set about scoring through an OpenAI-compatible server."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from nestling.core.frozen import Frozen

__all__ = ["OpenAiConfig"]


class OpenAiConfig(Frozen):
    """A server that samples in the scorer's stead; items, tools and grading stay here. See docs/prime-rl.md."""

    kind: Literal["vllm", "nestling", "url"] = "vllm"
    """vllm: `vllm serve`, nestling: `nestling serve`, each started here; url: a vLLM that somebody else keeps."""
    program: str = ""
    """The command to start, a name on PATH or a path; empty: the one named by `kind`."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the command, such as `--gpu-memory-utilization`, `0.5`."""
    keep: bool = False
    """Keep the server between scorings; it holds its GPU memory while jobs train."""
    url: str = Field("", pattern=r"^(https?://[^\s#?@]+)?$")
    """With `kind = "url"`: ends before `/chat/completions`; serves each base under its own name."""
    key_env: str = Field("NESTLING_SCORER_KEY", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """With `kind = "url"`: environment variable of its key; unset: none is sent."""
    parallel: int = Field(64, ge=1, le=4096)
    """Requests at the same time."""
    start_s: float = Field(900.0, gt=0)
    """Until a started server answers; part of `inner.score_wall_s`."""
    request_s: float = Field(120.0, gt=0)
    """Of one request."""
    retries: int = Field(4, ge=0, le=20)
    """Of one request after 429, 5xx, a timeout or a broken connection."""
    restarts: int = Field(2, ge=0, le=20)
    """Of a server that died, per scoring."""
    temperature: float = Field(1.0, ge=0, le=2)
    """Of the hidden eval, before and after."""
    extensions: bool = True
    """Send fields that vLLM documents and OpenAI does not; without them vLLM samples as the model's own files say."""

    @model_validator(mode="after")
    def _fits_kind(self) -> OpenAiConfig:
        if (self.kind == "url") != bool(self.url):
            raise ValueError('url goes with kind = "url", and only with it')
        if self.kind == "url" and (self.program or self.arguments):
            raise ValueError(
                'program and arguments are for servers started here, not for kind = "url"'
            )
        return self
