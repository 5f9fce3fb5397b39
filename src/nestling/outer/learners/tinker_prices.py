"""What a run spends at the service: tokens counted here, prices from the file the service publishes.

The file is a JSON list with one object per model: `tinker_id` and, as text like "$1.87", USD per
million tokens for `prefill`, `cached_prefill`, `sample` and `train`. An estimate, not a bill.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx
from pydantic import Field

from nestling.core.errors import ConfigError
from nestling.core.frozen import Frozen

__all__ = ["PRICES_URL", "Prices", "Usage", "read_prices"]

PRICES_URL: Final = "https://tinker-docs.thinkingmachines.ai/tinker/models.json"
_TIMEOUT_S: Final = 10.0
_KINDS: Final = ("prefill", "cached_prefill", "sample", "train")


class Usage(Frozen):
    """Tokens by what they are billed as."""

    prefill: int = Field(0, ge=0)
    """Prompt tokens that were not in the service's cache."""
    cached_prefill: int = Field(0, ge=0)
    sample: int = Field(0, ge=0)
    train: int = Field(0, ge=0)

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{kind: getattr(self, kind) + getattr(other, kind) for kind in _KINDS})

    def __sub__(self, other: Usage) -> Usage:
        return Usage(**{kind: getattr(self, kind) - getattr(other, kind) for kind in _KINDS})


class Prices(Frozen):
    """USD per million tokens of one model."""

    prefill: float = Field(ge=0)
    cached_prefill: float = Field(ge=0)
    sample: float = Field(ge=0)
    train: float = Field(ge=0)

    def usd(self, usage: Usage) -> float:
        """Cost of these tokens."""
        return float(sum(getattr(self, kind) * getattr(usage, kind) for kind in _KINDS)) / 1e6


def read_prices(model: str, price_file: str = "") -> Prices:
    """The prices of a model, from a local file or the published one. Blocks for 10 s at most.

    Raises:
        ConfigError: no file, or the model is not in it with all four prices.
    """
    where = price_file or PRICES_URL
    try:
        listed = json.loads(Path(price_file).read_bytes()) if price_file else _fetch(where)
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise ConfigError(
            f"the price file {where} cannot be read: {type(error).__name__}: {error}; expected a JSON "
            "list of models; download it and name it in learner.price_file"
        ) from error
    entries = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    for entry in entries:
        if entry.get("tinker_id") == model:
            return _prices(entry, model, where)
    raise ConfigError(
        f"{where} has no price of {model!r}; expected an entry with that tinker_id; check "
        "learner.base_model, or add the entry to a copy named in learner.price_file"
    )


def _fetch(url: str) -> Any:  # noqa: ANN401 (JSON)
    # The site answers 403 to clients that do not name themselves.
    headers = {"User-Agent": "nestling"}
    answer = httpx.get(url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True)
    return answer.raise_for_status().json()


def _prices(entry: Mapping[str, Any], model: str, where: str) -> Prices:
    found = {}
    for kind in _KINDS:
        text = str(entry.get(kind, "")).strip().removeprefix("$").replace(",", "")
        try:
            found[kind] = float(text)
        except ValueError as error:
            raise ConfigError(
                f"{where} gives {model!r} no price for {kind} ({entry.get(kind)!r}); expected a text "
                'such as "$1.87"; complete it in a copy named in learner.price_file'
            ) from error
    return Prices(**found)
