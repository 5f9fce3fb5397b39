"""The API's rate limits as its headers tell them: several windows at once, per user.

`RateLimit-Policy: "minute";q=60;w=60, ...` and `RateLimit: "minute";r=12;t=30, ...`: quota and window,
what is left and seconds until it is full again. Nothing is hard-coded; without headers nothing is
assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nestling.core.clock import Clock

__all__ = ["RateLimits", "Window"]

_SPARE = 0.2
"""Below this share of a quota we slow down."""


@dataclass(frozen=True, slots=True)
class Window:
    """One quota."""

    quota: int
    remaining: int
    resets_s: float
    """On the monotonic clock."""


class RateLimits:
    """What the last answers said."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.windows: dict[str, Window] = {}

    def note(self, headers: Mapping[str, str]) -> None:
        """Take in an answer's headers; what cannot be read is passed over."""
        quotas = {name: fields.get("q") for name, fields in _items(headers.get("ratelimit-policy"))}
        now_s = self._clock.monotonic()
        for name, fields in _items(headers.get("ratelimit")):
            remaining, resets_s = fields.get("r"), fields.get("t")
            if remaining is not None and resets_s is not None:
                quota = quotas.get(name) or remaining
                self.windows[name] = Window(quota, remaining, now_s + resets_s)

    def wait_s(self) -> float:
        """How long to hold the next request back: until no window is empty."""
        now_s = self._clock.monotonic()
        empty = [one.resets_s - now_s for one in self.windows.values() if one.remaining <= 0]
        return max([0.0, *empty])

    def pace_s(self, usual_s: float) -> float:
        """Seconds between routine requests: spread over what is left when that is little."""
        now_s = self._clock.monotonic()
        paces = [
            (one.resets_s - now_s) / max(one.remaining, 1)
            for one in self.windows.values()
            if one.remaining < _SPARE * one.quota and one.resets_s > now_s
        ]
        return max([usual_s, *paces])


def _items(header: str | None) -> list[tuple[str, dict[str, int]]]:
    """A structured-field list: names with whole-number parameters."""
    found = []
    for item in (header or "").split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        fields = {}
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if value.isascii() and value.isdigit():
                fields[key] = int(value)
        if name and fields:
            found.append((name.strip('"'), fields))
    return found
