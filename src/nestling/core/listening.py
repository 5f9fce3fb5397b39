"""Where our HTTP servers listen."""

from __future__ import annotations

import socket

from nestling.core.errors import ConfigError

__all__ = ["base_url", "bound_socket"]


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening socket at this address; port 0: any free one. `ConfigError` when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; expected a free port; "
            f"choose another with --port, or 0 for any"
        ) from error


def base_url(host: str, taken: socket.socket) -> str:
    """`http://HOST:PORT` of a server on this socket."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{taken.getsockname()[1]}"
