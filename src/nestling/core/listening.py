"""Where our HTTP servers listen."""

from __future__ import annotations

import socket
from typing import Final

from nestling.core.errors import ConfigError

__all__ = ["base_url", "bound_socket"]

_MAX_PORT: Final = 65_535


def bound_socket(host: str, port: int, *, setting: str = "--port") -> socket.socket:
    """A listening socket at this address; port 0: any free one.

    Raises:
        ConfigError: it cannot be had; names the `setting` that chose it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not 0 <= port <= _MAX_PORT:
        raise ConfigError(
            f"{setting}: port {port}; expected 0 (any free one) to {_MAX_PORT}; for example 8443"
        )
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; expected a free port; "
            f"choose another with {setting}, or 0 for any"
        ) from error


def base_url(host: str, taken: socket.socket) -> str:
    """`http://HOST:PORT` of a server on this socket."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{taken.getsockname()[1]}"
