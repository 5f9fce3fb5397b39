"""The stack process: `python -m nestling.inner.stack_process`, one per device.

Its settings come as one JSON line on standard input; it says `ready` on standard output, and ends when its input does.
It holds weights, optimisers and token ids of many jobs, and never any job's code.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from nestling.core.clock import SystemClock
from nestling.core.errors import NestlingError
from nestling.inner.stack_config import StackConfig

__all__ = ["main"]


def main() -> int:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    settings = json.loads(sys.stdin.readline())
    path = settings["socket"]
    from nestling.inner.stack_server import StackServer  # takes seconds

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        os.umask(0o077)
        listener.bind(path)
        listener.listen(256)
        try:
            server = StackServer(
                listener,
                bases={name: Path(folder) for name, folder in settings["bases"].items()},
                device=settings["device"],
                config=StackConfig.model_validate(settings["config"]),
                clock=SystemClock(),
            )
        except NestlingError as error:
            sys.stderr.write(f"{error}\n")
            return 2
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        server.run(sys.stdin.fileno())
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
