"""Things outside a jail that an escape would touch: listeners, a process, files."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Traps", "opened_traps"]

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traps:
    """All on this machine's loopback or in the room's own folder."""

    tcp: socket.socket
    udp: socket.socket
    local: socket.socket
    """A Unix socket with a path."""
    abstract: socket.socket
    """A Unix socket of the network namespace."""
    local_path: Path
    abstract_name: str
    victim: subprocess.Popen[bytes]
    """A process of ours that only waits."""
    file: Path
    """World-writable, with known content."""

    @property
    def port(self) -> int:
        """Of the TCP listener; the UDP one has its own."""
        return int(self.tcp.getsockname()[1])

    @property
    def udp_port(self) -> int:
        """Of the UDP listener."""
        return int(self.udp.getsockname()[1])

    def sprung(self) -> list[str]:
        """What an attack reached; empty when nothing."""
        found = []
        for name in ("tcp", "local", "abstract"):
            with suppress(BlockingIOError):
                connection, _ = getattr(self, name).accept()
                connection.close()
                found.append(f"a connection to the {name} listener")
        with suppress(BlockingIOError):
            self.udp.recvfrom(2048)
            found.append("a datagram to the udp listener")
        if self.victim.poll() is not None:
            found.append("the outside process is dead")
        if self.file.read_text() != "untouched\n":
            found.append("the outside file was written")
        return found


@contextmanager
def opened_traps(folder: Path) -> Iterator[Traps]:
    """Set them up below `folder`; gone at the end."""
    local_path = folder / "socket"
    abstract_name = f"\0nestling-redteam-{folder.name}"
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        local = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        tcp.bind((_LOOPBACK, 0))
        udp.bind((_LOOPBACK, 0))
        local.bind(str(local_path))
        local_path.chmod(0o777)
        abstract.bind(abstract_name)
        for listener in (tcp, local, abstract):
            listener.listen(8)
        for one in (tcp, udp, local, abstract):
            one.setblocking(False)
        file = folder / "outside.txt"
        file.write_text("untouched\n")
        file.chmod(0o666)
        victim = subprocess.Popen(["/bin/sleep", "3600"], start_new_session=True)
        stack.callback(_end, victim)
        yield Traps(
            tcp=tcp,
            udp=udp,
            local=local,
            abstract=abstract,
            local_path=local_path,
            abstract_name=abstract_name,
            victim=victim,
            file=file,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
