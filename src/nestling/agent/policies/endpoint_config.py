"""Which endpoint plays, how it is asked, and what it may cost."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field, ValidationError, model_validator

from nestling.core.errors import ConfigError
from nestling.core.frozen import Frozen

__all__ = ["EndpointConfig", "TokenPrices", "read_endpoint"]

_FORM = (
    "endpoint:URL#MODEL or endpoint:URL#MODEL?name=value&..., "
    "such as endpoint:http://127.0.0.1:8000/v1#hatchling?temperature=0"
)


class TokenPrices(Frozen):
    """US dollars per million tokens."""

    usd_in: float = Field(ge=0)
    usd_out: float = Field(ge=0)

    def cost_usd(self, tokens_in: int, tokens_out: int) -> float:
        """Of so many tokens."""
        return (self.usd_in * tokens_in + self.usd_out * tokens_out) / 1e6


class EndpointConfig(Frozen):
    """An OpenAI-compatible chat endpoint as an agent; for evaluation, it gives no tokens to train on."""

    url: str = Field(pattern=r"^https?://[^\s#?]+$")
    """Base URL, ending before `/chat/completions`."""
    model: str = Field(min_length=1)
    """As the endpoint calls it."""
    style: Literal["compact", "full"] = "full"
    """Prompt; compact is for the tiny models that we serve ourselves."""
    temperature: float = Field(0.7, ge=0, le=2)
    max_turn_tokens: int = Field(4096, ge=1)
    """Asked for as `max_tokens`."""
    key_env: str = Field("NESTLING_API_KEY", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable of the API key; an unset one means no key."""
    concurrency: int = Field(8, ge=1, le=1024)
    """Requests at the same time."""
    timeout_s: float = Field(120.0, gt=0)
    """Of one request."""
    retries: int = Field(5, ge=0, le=20)
    """After 429, 5xx, a timeout or a broken connection."""
    wait_s: float = Field(0.5, gt=0)
    """Before the first retry; doubles with each, and is drawn between half and all of it."""
    max_wait_s: float = Field(60.0, gt=0)
    """Longest wait, asked for by the endpoint or not; an endpoint that asks for more is given up."""
    max_tokens: int | None = Field(None, ge=1)
    """Of all episodes together, read and written; None: no cap."""
    max_usd: float | None = Field(None, gt=0)
    """Of all episodes together; needs `prices`."""
    prices: TokenPrices | None = None

    @model_validator(mode="after")
    def _cap_has_prices(self) -> EndpointConfig:
        if self.max_usd is not None and self.prices is None:
            raise ValueError("max_usd needs the prices usd_in and usd_out, per million tokens")
        return self

    @property
    def identity(self) -> str:
        """Equal for settings that make the same agent, as far as that can be known."""
        same = {"url", "model", "style", "temperature", "max_turn_tokens"}
        text = json.dumps(self.model_dump(mode="json", include=same), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def read_endpoint(text: str) -> EndpointConfig:
    """Read `URL#MODEL?name=value&...`; names are those of `EndpointConfig`, `usd_in` and `usd_out`.

    Raises:
        ConfigError: not of that form, an unknown name, or a value out of bounds.
    """
    url, mark, rest = text.partition("#")
    model, _, settings = rest.partition("?")
    if not mark or not model:
        raise ConfigError(f"the endpoint {text!r} names no model; expected {_FORM}")
    given: dict[str, Any] = dict(parse_qsl(settings, keep_blank_values=True))
    if re.search(r"[^/]*@", urlsplit(url).netloc):
        raise ConfigError("an endpoint's URL holds a password; set the key's environment variable")
    prices = {name: given.pop(name) for name in ("usd_in", "usd_out") if name in given}
    if prices:
        given["prices"] = prices
    try:
        return EndpointConfig.model_validate({**given, "url": url.rstrip("/"), "model": model})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        known = ", ".join(name for name in EndpointConfig.model_fields if name != "prices")
        raise ConfigError(
            f"the endpoint {text!r}: {where}: {first['msg']}; expected {_FORM} with names out of "
            f"{known}, usd_in, usd_out"
        ) from error
