"""What a pod is told in its environment when it is made. Nothing in it is secret but one placeholder."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from nestling.core.errors import ConfigError

__all__ = ["API_URL", "BOOT_KEY_VARIABLE", "BOOT_VARIABLE", "Boot", "read_boot"]

API_URL = "https://api.runpod.io/v2"
"""Of real accounts."""

BOOT_VARIABLE = "NESTLING_POD"
"""JSON of a `Boot`."""
BOOT_KEY_VARIABLE = "NESTLING_BOOT_KEY"
"""The run's boot key; the API shows a placeholder, the platform fills a secret of the account in."""


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod is told in its environment; anybody with the account's key can read it."""

    name: str
    address: str
    """`https://host:port` of the controller."""
    certificate: str
    """Of the controller, PEM; no other is trusted."""
    api_url: str
    pins: list[str]
    """What to look up on this machine; the controller knows what it must be."""
    lost_controller_s: float


def read_boot(environment: Mapping[str, str]) -> Boot:
    """What this pod was told; `ConfigError` when it was told nothing that can be read."""
    try:
        return msgspec.json.decode(environment.get(BOOT_VARIABLE, ""), type=Boot)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{BOOT_VARIABLE} does not say whose pod this is: {error}; expected it to be set by "
            "`nestling fleet up` or `nestling run`"
        ) from error
